"""Keys that recipes once had, each with what to write instead. One line a key, so an old recipe is easy to mend."""

REMOVED: dict[str, str] = {
    "report.head": "write decode.head",
    "report.warmup_prompts": "remove it: the three longest prompts are decoded before timing starts",
    "report.workers": "remove it: one process measures all prompts",
    "export.head": "write decode.head",
}
