"""Keys that recipes once had, each with what to write instead. One line a key, so that old recipes are easy to mend."""

REMOVED: dict[str, str] = {}
