"""Keys that recipes once had, each with what to write instead; load.py refuses old recipes with these texts."""

REMOVED: dict[str, str] = {}
