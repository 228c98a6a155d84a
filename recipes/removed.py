"""Keys that recipes once had, each with what to write instead. One line a key, so that an old recipe is easy to mend."""

REMOVED: dict[str, str] = {
    "export.folder": "remove it: an export goes to RUN_DIR/export/FORMAT, which may then be moved",
    "export.overwrite": "remove it, and remove the earlier export's folder instead",
    "export.push_to": "remove it, and upload the exported folder: hf upload ORG/NAME FOLDER",
    "head.confidence": "remove it: headstart calibrates scores after training and trains no confidence head",
    "head.fc_norm": "write head.norms: true for the two norms of EAGLE-3.1, or remove it",
    "head.markov_gate": "remove it: the Markov head has no gate",
    "head.norm_output": "write head.norms: true for the two norms of EAGLE-3.1, or remove it",
    "head.sample_from_anchor": "remove it: heads with markov_rank above 0 or causal true predict the next token",
    "train.confidence_weight": "remove it: no confidence head is trained",
}
