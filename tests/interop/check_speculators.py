"""Does a head survive being saved by speculators? Compares its weights bit for bit, its texts, its accepted drafts.

    make check-speculators
    python tests/interop/check_speculators.py path/to/speculators/bin/python

Exports the bundled head for speculators, lets that library's own classes load and save it, converts the result back and
decodes the same prompts with both. Exit code 1 if anything differs.
"""

import shutil
import subprocess
import sys

import torch
from check_vllm import NUM_PROMPTS, decode
from safetensors.torch import load_file
from served_heads import CASES, TARGET, WORK, export_recipe, heldout_prompts, reduced

from headstart.common.files import read_jsonl
from headstart.heads.formats.convert import convert
from headstart.heads.formats.export import export
from headstart.heads.formats.lint import lint
from headstart.heads.frozen import FrozenTarget


def main() -> None:
    torch.set_num_threads(1)
    frozen = FrozenTarget.from_folder(TARGET, torch.float32)
    source, saved, back = reduced(frozen), WORK / "speculators_saved", WORK / "speculators_back"
    folder = export(export_recipe(source, CASES["speculators' layout, reduced"]))
    for old in (saved, back):
        shutil.rmtree(old, ignore_errors=True)
    subprocess.run([sys.argv[1], "tests/interop/save_with_speculators.py", str(folder), str(saved)], check=True)
    print("\n".join(convert(saved, back, str(TARGET))))
    one, other = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    same_bits = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    prompts = [row["tokens"] for row in read_jsonl(heldout_prompts())][:NUM_PROMPTS]
    before, after = (decode(head, prompts) for head in (source, back))  # texts, steps, accepted draft tokens by depth
    print(f"lint of what speculators saved: {list(map(str, lint(saved, str(TARGET)))) or 'nothing'}")
    print(f"weights bit for bit: {same_bits}; steps and accepted draft tokens {before[1:]} before, {after[1:]} after")
    sys.exit(0 if same_bits and before == after else 1)


if __name__ == "__main__":
    main()
