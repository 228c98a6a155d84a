"""All layouts of draft heads, which one a head's files have, and the export formats, which write them.

To add a format, add it to FORMATS, write its files here, and give the layout that it writes the engine's rules and
command, in heads/formats/kinds.
"""

from collections.abc import Iterator
from pathlib import Path

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.formats.config_rules import REFUSED, gives_hidden_states
from headstart.heads.formats.kinds.block import BLOCK, SPECULATORS_BLOCK
from headstart.heads.formats.kinds.eagle import EAGLE1, EAGLE3, EAGLE3_SPECULATORS, PEAGLE
from headstart.heads.formats.kinds.medusa import MEDUSA
from headstart.heads.formats.kinds.mtp import MTP
from headstart.heads.formats.speculators import not_in_speculators
from headstart.heads.formats.subject import Files, Layout, ServedTarget, Violation
from headstart.heads.kinds.checkpoint import head_config
from headstart.recipes.other_commands import ENGINE_NAMES

# The first one that recognises a head's files is theirs.
LAYOUTS: tuple[Layout, ...] = (MEDUSA, SPECULATORS_BLOCK, BLOCK, PEAGLE, EAGLE3_SPECULATORS, EAGLE3, EAGLE1, MTP)
# export.format -> the engine whose contract the export must meet; None asks nothing.
FORMATS = {
    "native": None,
    **{name: name for name in ("vllm", "sglang", "tensorrt_llm", "speculators")},
    "gguf": "llama_cpp",
}


def layout_of(files: HeadFiles) -> Layout:
    """The layout of a head's files, recognised by their content; ValueError for an unknown one."""
    kind = files.config.get("headstart", {}).get("kind")
    recognised = [layout for layout in LAYOUTS if layout.recognises(files)]
    if matches := recognised or [layout for layout in LAYOUTS if layout.name == kind]:
        return matches[0]
    unknown = f"the layout of this draft head is unknown (its tensors: {', '.join(sorted(files.names)[:4])}, ...)"
    allowed = "EAGLE-1, EAGLE-3, P-EAGLE, speculators' eagle3, Medusa, DFlash and DSpark are allowed"
    advice = "give the folder of such a head, or bring a whole target's MTP layer in with headstart convert"
    raise ValueError(f"{files.folder}: {unknown}; {allowed}: {advice}")


def files_in_format(name: str, head: DraftHead, target: ServedTarget) -> Files:
    """config.json and tensors of a head in a format; raises ValueError if its layout cannot hold the head.

    The formats but native and speculators have the same files, in which llama.cpp's converter reads EAGLE-3 heads.
    """
    if name == "speculators":  # the files name their target, the "verifier"
        for layout in LAYOUTS:
            if layout.write is not None and type(head) is layout.kind:
                return layout.write(head, target)
        raise not_in_speculators(head)
    return head_config(head), head.engine_tensors() if name == "native" else head.served_tensors()


def refusing_engine(export_format: str, kind: type[DraftHead], family: str) -> str | None:
    """The engine of a format, with its version, if it starts no such head for targets of this family."""
    engine = FORMATS[export_format]
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
