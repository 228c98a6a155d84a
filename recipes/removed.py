"""Keys that recipes once had, each with what to write instead; load.py refuses old recipes with these texts."""

REMOVED: dict[str, str] = {
    "target.device_map": "write target.split: layers",
    "target.packed_weights": "remove it: weights are packed wherever this makes steps faster",
    "target.tp_plan": "write target.split: tensor",
    "target.zero_stage": "write target.split: tensor, or layers in a single process",
}
