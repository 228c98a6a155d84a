"""Keys that recipes once had, each with what to write instead. One line a key, so that an old recipe is easy to mend."""

REMOVED: dict[str, str] = {
    "decode.typical_epsilon": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "decode.typical_delta": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
}
