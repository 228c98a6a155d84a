"""Keys that recipes once had, each with what to write instead. One line a key: an old recipe is easy to mend."""

REMOVED: dict[str, str] = {}
