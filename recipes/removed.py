"""Keys that recipes once had, each with what to write instead; load.py refuses old recipes with these texts."""

REMOVED: dict[str, str] = {
    "decode.ngram": "remove it: prompt_lookup and suffix search for up to 3 tokens",
    "decode.paths": "remove it, and write growth: searched for a tree of one shape, which headstart calibrate fits",
    "decode.typical_delta": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "decode.typical_epsilon": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "target.device_map": "write target.split: layers",
    "target.packed_weights": "remove it: weights are packed wherever this makes steps faster",
    "target.tp_plan": "write target.split: tensor",
    "target.zero_stage": "write target.split: tensor, or layers in a single process",
}
