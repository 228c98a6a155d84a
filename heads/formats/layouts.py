"""The export formats: for each, a function that turns a head into the config.json and tensors that an engine reads.

Each raises ValueError for a head that its layout cannot hold. To add a format, write such a function, add it to
FORMATS, and give the layout that it writes the engine's rules and command, in heads/formats/kinds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.base import DraftHead
from headstart.heads.formats.config_rules import REFUSED, gives_hidden_states
from headstart.heads.formats.kinds.registry import LAYOUTS
from headstart.heads.formats.speculators import not_in_speculators
from headstart.heads.formats.subject import Files, ServedTarget, Violation
from headstart.heads.kinds.checkpoint import head_config
from headstart.recipes.other_commands import ENGINE_NAMES


@dataclass(frozen=True)
class Format:
    files: Callable[[DraftHead, ServedTarget], Files]
    engine: str | None  # the engine whose contract an export must meet; None asks nothing


def native_files(head: DraftHead, target: ServedTarget) -> Files:
    """Our own format, as training saves it."""
    return head_config(head), head.engine_tensors()


def engine_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that vLLM, SGLang and TensorRT-LLM read."""
    return head_config(head), head.served_tensors()


def gguf_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that llama.cpp's converter reads."""
    served = [layout.kind for layout in LAYOUTS if "llama_cpp" in layout.rules]
    if type(head) not in served:
        given = f"export.format: 'gguf' given for a head of kind {head.kind}"
        allowed = f"{served[0].title} is allowed: llama.cpp drafts with no other"
        raise ValueError(f"{given}, {allowed}; vllm and native hold this head")
    return engine_files(head, target)


def speculators_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that speculators and vLLM load as one model, which names its target (their "verifier")."""
    for layout in LAYOUTS:
        if layout.write is not None and type(head) is layout.kind:
            return layout.write(head, target)
    raise not_in_speculators(head)


def refusing_engine(export_format: str, kind: type[DraftHead], family: str) -> str | None:
    """The engine of a format, with its version, if it starts no such head for targets of this family."""
    engine = FORMATS[export_format].engine
    rules = [rule for layout in LAYOUTS if layout.kind is kind for rule in layout.rules.get(str(engine), ())]
    label, families = REFUSED.get(str(engine), ("", frozenset()))
    return label if gives_hidden_states in rules and family in families else None


def is_whole_target(head: DraftHead, export_format: str) -> bool:
    """Whether an export of this head is a whole target: engines draft with the layer of their target."""
    return head.is_target_layer and export_format != "native"


def serving_sections(
    head: DraftHead, target: ServedTarget, folder: Path, violations: dict[str, list[Violation]]
) -> Iterator[str]:
    """A heading for each engine that reads the layout, followed by its command or by the reasons why it has none."""
    layout = next(each for each in LAYOUTS if type(head) is each.kind and violations.keys() <= each.rules.keys())
    for engine, broken in violations.items():
        yield f"### {ENGINE_NAMES[engine]}"
        errors = [violation for violation in broken if violation.severity == "error"]
        if errors:
            reasons = "\n".join(f"- {violation.where}: {violation.allowed}" for violation in errors)
            yield f"Cannot serve this head as it was trained:\n\n{reasons}"
        else:
            yield layout.commands[engine](head, target, folder)


FORMATS = {
    "native": Format(native_files, None),
    "vllm": Format(engine_files, "vllm"),
    "sglang": Format(engine_files, "sglang"),
    "tensorrt_llm": Format(engine_files, "tensorrt_llm"),
    "speculators": Format(speculators_files, "speculators"),
    "gguf": Format(gguf_files, "llama_cpp"),
}
