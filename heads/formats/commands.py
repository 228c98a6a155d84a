"""The commands by which engines serve an export, for its README.md."""

import json
from pathlib import Path
from shlex import quote
from typing import Any

from headstart.heads.base import DraftHead
from headstart.heads.formats.subject import ServedTarget

GGUF = "head.gguf"  # the file that llama.cpp reads


def revision_option(target: ServedTarget) -> str:
    return f" --revision {quote(target.revision)}" if target.revision else ""


def in_python(text: str | Path) -> str:
    """A text as a string literal, which Python and YAML both read."""
    return json.dumps(str(text), ensure_ascii=False)


def vllm_command(method: str, head: DraftHead, target: ServedTarget, folder: Path, **more: Any) -> str:
    """vLLM's command for its `method` of drafting, with `more` options of it."""
    served, options = f"{quote(target.name)}{revision_option(target)}", {"method": method, "model": str(folder)}
    if head.is_target_layer:
        served, options = quote(str(folder)), {"method": method}
    tokens = min(target.draft_tokens, head.max_levels or target.draft_tokens)
    config = json.dumps({**options, "num_speculative_tokens": tokens, **more})
    return f"```\nvllm serve {served} --speculative-config {quote(config)}\n```"


def speculators_vllm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    command = f"vllm serve {quote(str(folder))}"
    return f"```\n{command}\n```\n\nvLLM reads the name of the target, `{target.name}`, from config.json."


def sglang_launch(target: ServedTarget) -> str:
    return f"python -m sglang.launch_server --model-path {quote(target.name)}{revision_option(target)}"


def sglang_command(algorithm: str, head: DraftHead, target: ServedTarget, folder: Path) -> str:
    """SGLang's command for a head that drafts a level in each call."""
    launch, option = sglang_launch(target), f"--speculative-draft-model-path {quote(str(folder))} "
    if head.is_target_layer:
        launch, option = f"python -m sglang.launch_server --model-path {quote(str(folder))}", ""
    return (
        f"```\n{launch} \\\n"
        f"    --speculative-algorithm {algorithm} {option}\\\n"
        f"    --speculative-num-steps {target.draft_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {target.draft_tokens + 1}\n```"
    )


def speculators_command(module: str, name: str, folder: Path) -> str:
    """How speculators loads a head of this class."""
    load = f"model = {name}.from_pretrained({in_python(folder)})"
    return f"```python\nfrom speculators.models.{module} import {name}\n\n{load}\n```"


def tensorrt_llm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    layers = [tap - 1 for tap in head.taps]
    return (
        "```\ncat > speculative.yaml <<'END'\nspeculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {target.draft_tokens}\n  speculative_model: {in_python(folder)}\n"
        f"  eagle3_layers_to_capture: {layers}\nEND\n"
        f"trtllm-serve {quote(target.name)} --extra_llm_api_options speculative.yaml\n```"
    )


def llama_cpp_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    return (
        f"```\nconvert_hf_to_gguf.py {quote(target.name)} --outtype bf16 --outfile target.gguf\n"
        f"llama-server -m target.gguf -md {quote(str(folder / GGUF))} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {target.draft_tokens}\n```"
    )
