"""Keys that recipes once had, each with what to write instead; load.py refuses old recipes with these texts."""

REMOVED: dict[str, str] = {
    "decode.ngram": "remove it: prompt_lookup and suffix search for up to 3 tokens",
    "decode.paths": "remove it, and write growth: searched for a tree of one shape, which headstart calibrate fits",
    "decode.seed": "remove it: the report samples with the recipe's seed, and requests carry their own",
    "decode.typical_delta": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "decode.typical_epsilon": "remove it: acceptance is seeded or rejection, and both keep the target's distribution",
    "export.folder": "remove it: an export goes to RUN_DIR/export/FORMAT, which may then be moved",
    "export.overwrite": "remove it, and remove the earlier export's folder instead",
    "export.push_to": "remove it, and upload the exported folder: hf upload ORG/NAME FOLDER",
    "head.confidence": "remove it: headstart calibrates scores after training and trains no confidence head",
    "head.fc_norm": "write head.norms: true for the two norms of EAGLE-3.1, or remove it",
    "head.markov_gate": "remove it: the Markov head has no gate",
    "head.norm_output": "write head.norms: true for the two norms of EAGLE-3.1, or remove it",
    "head.sample_from_anchor": "remove it: heads with markov_rank above 0 or causal true predict the next token",
    "target.device_map": "write target.split: layers",
    "target.packed_weights": "remove it: weights are packed wherever this makes steps faster",
    "target.tp_plan": "write target.split: tensor",
    "target.zero_stage": "write target.split: tensor, or layers in a single process",
    "train.confidence_weight": "remove it: no confidence head is trained",
}
