"""Keys that recipes once had, each with what to write instead. One line a key, so that an old recipe is easy to mend."""

SAMPLED = "remove it: each request carries its own, and reports vary only report.temperatures"
REMOVED: dict[str, str] = {
    "decode.top_k": SAMPLED,
    "decode.top_p": SAMPLED,
    "decode.min_p": SAMPLED,
    "decode.repetition_penalty": SAMPLED,
    "decode.presence_penalty": SAMPLED,
    "decode.frequency_penalty": SAMPLED,
    "decode.seed": "remove it: the report samples with the recipe's seed, and requests carry their own",
    "decode.ngram": "remove it: prompt_lookup and suffix search for up to 3 tokens",
    "decode.paths": "remove it, and write growth: searched for a tree of one shape, which headstart calibrate fits",
    "decode.typical_epsilon": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "decode.typical_delta": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
}
