"""The serving sections of an export's README.md: for each engine its command, or why it cannot serve the head."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

from headstart.heads.base import DraftHead
from headstart.heads.formats.layouts import GGUF, ServedTarget
from headstart.heads.formats.subject import Violation
from headstart.heads.kinds.block import BlockHead
from headstart.recipes.other_commands import ENGINE_NAMES

Command = Callable[[DraftHead, ServedTarget, Path], str]


def serving_sections(
    head: DraftHead, target: ServedTarget, folder: Path, violations: dict[str, list[Violation]]
) -> Iterator[str]:
    """A heading for each engine that reads the layout, followed by its command or by the reasons why it has none."""
    commands = COMMANDS | ({"vllm": speculators_vllm_command} if "speculators" in violations else {})
    for engine, broken in violations.items():
        yield f"### {ENGINE_NAMES[engine]}"
        errors = [violation for violation in broken if violation.severity == "error"]
        if errors:
            reasons = "\n".join(f"- {violation.where}: {violation.allowed}" for violation in errors)
            yield f"Cannot serve this head as it was trained:\n\n{reasons}"
        else:
            yield commands[engine](head, target, folder)


def headstart_section(target: ServedTarget, folder: Path, can_load: bool) -> str:
    """How to decode with the export in headstart itself, which must convert the formats that it cannot load."""
    if not can_load:
        return (
            f"Convert the head first; `runs/imported` is then a head that every headstart command reads:\n\n"
            f"```\nheadstart convert {quote(str(folder))} runs/imported --target {quote(target.name)}\n```"
        )
    revision = f", revision={in_python(target.revision)}" if target.revision else ""
    return (
        "```python\nfrom headstart import SpeculativeModel\n\n"
        f"model = SpeculativeModel.from_folders({in_python(target.name)}, {in_python(folder)}{revision})\n```"
    )


def revision_option(target: ServedTarget) -> str:
    return f" --revision {quote(target.revision)}" if target.revision else ""


def in_python(text: str | Path) -> str:
    """A text as a string literal, which Python and YAML both read."""
    return json.dumps(str(text), ensure_ascii=False)


def in_yaml(path: Path) -> str:
    """A path as YAML, in quotes only if it needs them."""
    return str(path) if quote(str(path)) == str(path) else in_python(path)


def vllm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    if head.kind == "mtp":
        options = json.dumps({"method": "mtp", "num_speculative_tokens": target.draft_tokens})
        return f"```\nvllm serve {quote(str(folder))} --speculative-config {quote(options)}\n```"
    if isinstance(head, BlockHead):  # any other number than the block was trained with collapses acceptance
        method, tokens = head.shape.method, head.shape.levels
    else:
        method = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa"}[head.kind]
        tokens = min(target.draft_tokens, head.max_levels or target.draft_tokens)
    options = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": tokens})
    note = "\n\nRequires vLLM 0.32 or older; later versions cannot serve Medusa heads." if head.kind == "medusa" else ""
    name = quote(target.name)
    return f"```\nvllm serve {name}{revision_option(target)} --speculative-config {quote(options)}\n```{note}"


def speculators_vllm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    command = f"vllm serve {quote(str(folder))}"
    return f"```\n{command}\n```\n\nvLLM reads the name of the target, `{target.name}`, from config.json."


def sglang_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    launch = f"python -m sglang.launch_server --model-path {quote(target.name)}{revision_option(target)}"
    if isinstance(head, BlockHead):
        name, size = head.shape.method.upper(), head.shape.block_size
        count = f"dspark-block-size {size}" if name == "DSPARK" else f"num-draft-tokens {size}"
        folder_option = f"--speculative-draft-model-path {quote(str(folder))}"
        return f"```\n{launch} \\\n    --speculative-algorithm {name} {folder_option} --speculative-{count}\n```"
    option = f"--speculative-draft-model-path {quote(str(folder))} "
    if head.kind == "mtp":
        launch, option = f"python -m sglang.launch_server --model-path {quote(str(folder))}", ""
    algorithm = {"eagle1": "EAGLE", "eagle3": "EAGLE3", "mtp": "NEXTN"}[head.kind]
    return (
        f"```\n{launch} \\\n"
        f"    --speculative-algorithm {algorithm} {option}\\\n"
        f"    --speculative-num-steps {target.draft_tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {target.draft_tokens + 1}\n```"
    )


def tensorrt_llm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    layers = [tap - 1 for tap in head.taps]
    return (
        "```\ncat > speculative.yaml <<'END'\nspeculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {target.draft_tokens}\n  speculative_model: {in_yaml(folder)}\n"
        f"  eagle3_layers_to_capture: {layers}\nEND\n"
        f"trtllm-serve {quote(target.name)} --extra_llm_api_options speculative.yaml\n```"
    )


def speculators_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    module, name = "eagle3", "Eagle3DraftModel"
    if isinstance(head, BlockHead):
        module = head.shape.method
        name = "DSparkDraftModel" if module == "dspark" else "DFlashDraftModel"
    return (
        f"```python\nfrom speculators.models.{module} import {name}\n\n"
        f"model = {name}.from_pretrained({in_python(folder)})\n```"
    )


def llama_cpp_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    return (
        f"```\nconvert_hf_to_gguf.py {quote(target.name)} --outtype bf16 --outfile target.gguf\n"
        f"llama-server -m target.gguf -md {quote(str(folder / GGUF))} --spec-type draft-eagle3 "
        f"--spec-draft-n-max {target.draft_tokens}\n```"
    )


COMMANDS: dict[str, Command] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
    "tensorrt_llm": tensorrt_llm_command,
    "speculators": speculators_command,
    "llama_cpp": llama_cpp_command,
}
