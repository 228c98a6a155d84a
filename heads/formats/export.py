"""Export a trained head for a serving engine: config.json, weights and a README.md with the serving commands.

    headstart export recipes/tiny.yaml export.format=vllm
    headstart export recipes/tiny_full.yaml decode.head=assets/demo_head export.format=speculators

The formats are native, vllm, sglang, tensorrt_llm, speculators and gguf. gguf adds head.gguf for llama.cpp, written by
llama.cpp's own converter, convert_hf_to_gguf.py, which must be on the PATH. EAGLE-3 heads get examples/one_file.py as
custom_generate/generate.py, with which transformers drafts (speculators' layout aside). Before anything is written, the
files are checked against what the format's engine reads (see headstart lint), and a head that the engine would serve
worse than it was trained is refused with every reason. vllm, sglang and tensorrt_llm write the same files and differ
only in this check. For head.kind mtp, vllm and sglang write the whole target with the tuned layer. The export goes to
RUN_DIR/export/FORMAT, which must not exist yet. To share it: hf upload ORG/NAME FOLDER.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from headstart.common.errors import wrong_value
from headstart.common.files import read_json
from headstart.heads.files import MODEL, HeadFiles, read_safetensors, refuse_existing, write_folder, write_safetensors
from headstart.heads.formats.card import acceptance_lengths, card
from headstart.heads.formats.commands import GGUF
from headstart.heads.formats.kinds.eagle import EAGLE3
from headstart.heads.formats.layouts import FORMATS, files_in_format, is_whole_target, layout_of
from headstart.heads.formats.lint import violations
from headstart.heads.formats.subject import ServedTarget, Violation
from headstart.heads.frozen import FrozenTarget, SafetensorsFolder
from headstart.heads.kinds.checkpoint import load_head_for, stored_dtype
from headstart.heads.quantised import FLOAT8_CONFIG, in_float8, without_scales
from headstart.heads.target_config import folder_of, path_for_engines
from headstart.recipes import Recipe
from headstart.recipes.checks import refuse_original_target
from headstart.recipes.other_commands import OWN_FORMAT
from headstart.recipes.schema import ExportSection

CONVERTER = "convert_hf_to_gguf.py"  # in the root of llama.cpp's sources
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SHOWN = 400  # last characters of what the converter printed
ONE_FILE = Path(__file__).resolve().parents[2] / "examples/one_file.py"
NOT_COPIED = ("README.md",)  # files of a target that its export leaves out


def export(recipe: Recipe) -> Path:
    """Check and write the head, and return its folder, RUN_DIR/export/FORMAT.

    Raises ValueError with every reason why the format's engine would not serve it as trained, or if the folder exists.
    """
    section = recipe.export
    refuse_original_target(recipe)
    folder = recipe.export_dir / section.format
    refuse_existing(folder)
    target_folder = folder_of(recipe.target)
    source = recipe.head_in_use
    in_eight_bits = section.dtype == "float8"
    dtype = stored_dtype(source) if in_eight_bits or section.dtype is None else section.dtype
    frozen = FrozenTarget.from_folder(target_folder, getattr(torch, dtype))
    head = load_head_for(source, frozen)
    architectures = read_json(target_folder / "config.json").get("architectures", [])
    path = path_for_engines(recipe.target, target_folder)
    target = ServedTarget(path, architectures, recipe.decode.depth, recipe.target.revision)
    config, tensors = files_in_format(section.format, head, target)

    files, stored = HeadFiles(folder, config, tensors), tensors
    if in_eight_bits:  # everything is checked with the numbers that engines will compute with
        if FORMATS[section.format] is None:
            given, remedy = f"'float8' with export.format {section.format!r}", "choose vllm, or export.dtype=bfloat16"
            raise wrong_value("export.dtype", given, "the format of an engine that reads float8 is", remedy)
        config["quantization_config"], stored = FLOAT8_CONFIG, in_float8(tensors)
        files = replace(files, tensors=without_scales(stored, folder))
    by_engine = checked_engines(section, files, frozen)
    additions: list[Callable[[Path], None]] = []
    if section.format == "gguf":
        additions.append(partial(write_gguf, find_converter(), target=target_folder, dtype=config["torch_dtype"]))
    if is_whole_target(head, section.format):
        additions.append(partial(write_whole_target, target=target_folder, tensors=tensors))
    if for_transformers := layout_of(files) is EAGLE3 and not in_eight_bits and not config["norm_before_fc"]:
        additions.append(write_custom_generate)
    clean = [engine for engine, broken in by_engine.items() if not broken]
    lengths = acceptance_lengths(recipe) if source == recipe.head_dir else {}
    promise = {"acceptance_length": lengths} if lengths else {}
    config["headstart"] = {**config["headstart"], "engines": clean, **promise}
    readme = card(recipe, head, target, target_folder, folder, by_engine, for_transformers)
    write_folder(replace(files, tensors=stored), readme, *additions)
    engines = ", ".join(clean) or "headstart"
    print(
        f"{head.kind} head written to {folder}; {engines} can serve it, with the commands in its README.md; to share "
        f"it: hf upload ORG/NAME {quote(str(folder))}"
    )
    return folder


def checked_engines(section: ExportSection, files: HeadFiles, frozen: FrozenTarget) -> dict[str, list[Violation]]:
    """The violations of each engine's contract in an export's files, for all engines that read them.

    Raises ValueError if the format's own engine would serve the head worse than it was trained, or not at all.
    """
    layout, meant = layout_of(files), FORMATS[section.format]
    if layout.kind.is_target_layer and meant is None:
        return {}  # engines draft with the layer of their target, see `write_whole_target`
    given = f"export.format: {section.format!r} {section.origin('format')}"
    if meant is not None and meant not in layout.rules:
        raise ValueError(f"{given} for a head that only {', '.join(layout.rules)} can serve; choose one of them")
    engines = [engine for engine in layout.rules if engine == meant or {engine, meant}.isdisjoint(OWN_FORMAT)]
    by_engine = {engine: violations(files, frozen, [engine]) for engine in engines}
    if meant is not None and by_engine[meant]:
        reasons = "\n  ".join(map(str, by_engine[meant]))
        raise ValueError(
            f"{given}, but the engine would not serve the head as it was trained:\n  {reasons}\n"
            f"choose another export.format or train a head that fits; docs/interop.md lists what each format needs"
        )
    return by_engine


def find_converter() -> str:
    """The converter's command; raises ValueError, saying how to get it, if it is not on the PATH."""
    command = shutil.which(CONVERTER)
    if command is None:
        raise ValueError(
            f"export.format: 'gguf' given, but llama.cpp's converter, {CONVERTER}, is not on the PATH, where it is "
            f"required; make check-llamacpp fetches it: "
            f'export PATH="$PWD/.venv-llamacpp/bin:$PWD/.venv-llamacpp/llama.cpp:$PATH"'
        )
    return command


def write_custom_generate(head: Path) -> None:
    """Write the code that `model.generate(..., custom_generate=FOLDER)` of transformers runs."""
    (head / "custom_generate").mkdir()
    shutil.copyfile(ONE_FILE, head / "custom_generate/generate.py")


def write_gguf(converter: str, head: Path, target: Path, dtype: str) -> None:
    """Write the head of a folder, with the tokenizer of its target's folder, as `head.gguf` into that folder.

    Raises ValueError with the end of the converter's own messages if it fails.
    """
    command = [converter, str(head), "--target-model-dir", str(target), "--outtype", OUTTYPES[dtype]]
    done = subprocess.run([*command, "--outfile", str(head / GGUF)], capture_output=True, text=True, check=False)
    if done.returncode or not (head / GGUF).is_file():
        said = " ".join((done.stdout + done.stderr).split())[-SHOWN:]
        raise ValueError(
            f"export.format: 'gguf' given, but {CONVERTER} ended with: ...{said}; a target and a tokenizer that "
            "llama.cpp knows are required: choose another format"
        )


def write_whole_target(folder: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Make a folder the target's, with these of its tensors: files of weights that hold none of them become links.

    Tensors that the target stores quantised are quantised again, with new scales, so its config.json stays right.
    """
    stored, new = SafetensorsFolder(target), dict[str, Tensor]()
    for name, tensor in tensors.items():
        new |= stored.as_stored(name, tensor)
    changed = {stored.files[name] for name in new}
    (folder / MODEL).unlink()
    for file in sorted(target.iterdir()):
        if not file.is_file() or file.name in NOT_COPIED:
            continue
        if file.name in changed:
            shard = read_safetensors(file)
            shard |= {name: new[name] for name in shard.keys() & new.keys()}
            write_safetensors(shard, folder / file.name, {"format": "pt"})
        elif file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, folder / file.name)
