"""Does llama.cpp draft with an exported EAGLE-3.0 head as headstart does? Compares passes and accepted draft tokens.

    make check-llamacpp
    python benchmarks/llamacpp_head.py --llamacpp .venv-llamacpp recipes/smollm2_135m.yaml \\
        decode.head=assets/smollm2_head

llama.cpp has no norms of EAGLE-3.1, so the head is the recipe's without them, with `fc` scaled to make up for those of
the hidden states: it drafts worse, and alike in both. It is exported with export.format=gguf, and both engines continue
the same questions greedily in float32, with chains of draft tokens. Exit code 1 if a count or a text differs.
"""

import dataclasses
import shutil
import sys
from typing import Any

import torch
from llamacpp import LlamaCpp, decoded, from_command_line
from rich.console import Console
from rich.table import Table
from serve import QUESTIONS

from headstart.heads.formats.commands import GGUF
from headstart.heads.formats.export import export
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.target_config import folder_of
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate
from headstart.inference.generate.loading import taps_to_read
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

NUM_QUESTIONS, NEW_TOKENS, DRAFT_TOKENS = 4, 48, 3


def without_norms(old: Eagle3Head, target: TargetModel, prompts: list[list[int]]) -> Eagle3Head:
    """The head as EAGLE-3.0, its `fc` divided by the usual size of the hidden states that it reads."""
    taps = [tap for prompt in prompts for tap in target.passes.hidden_states(torch.tensor([prompt]))[0]]
    sizes = [torch.cat([tap[0].pow(2).mean(-1).sqrt() for tap in taps[place :: len(old.taps)]]) for place in range(3)]
    scales = [old.get_parameter(f"fc_norm.{place}.weight") / size.median() for place, size in enumerate(sizes)]
    shape = dataclasses.replace(old.shape, fc_norm=False, norm_output=False)
    head = Eagle3Head(shape, target.frozen, old.vocab)
    state = {**old.state_dict(), "fc.weight": old.fc.weight * torch.cat(scales)}
    head.load_state_dict({name: state[name] for name in head.state_dict()})
    return head.eval().requires_grad_(False)


def run(recipe: Recipe, llama: LlamaCpp) -> bool:
    """Whether both decode alike; prints a row for each question."""
    folder, path = recipe.run_dir / "llamacpp", folder_of(recipe.target)
    section = recipe.target.model_copy(update={"dtype": "float32"})
    target, template = TargetModel.load_to_answer(section, taps_to_read(recipe)), ChatTemplate.of(recipe.target)
    prompts = [template.tokens([{"role": "user", "content": text}]) for text in QUESTIONS[:NUM_QUESTIONS]]
    old = load_head_for(recipe.head_in_use, target.frozen)
    assert isinstance(old, Eagle3Head)
    head = without_norms(old, target, prompts)
    shutil.rmtree(folder / "plain", ignore_errors=True)
    save_head(head, folder / "plain/head")
    fields: dict[str, Any] = {"format": "gguf", "dtype": "float32"}
    made = recipe.model_copy(
        update={
            "run_dir": folder / "plain",
            "target": section,
            "decode": recipe.decode.model_copy(update={"head": None, "depth": DRAFT_TOKENS}),
            "export": recipe.export.model_copy(update=fields),
        }
    )
    exported = export(made)
    table = Table(
        "question", "tokens", "passes", "accepted", "passes in llama.cpp", "accepted in llama.cpp", "same text"
    )
    options = ("-md", exported / GGUF, "--spec-type", "draft-eagle3", "--spec-draft-n-max", DRAFT_TOKENS)
    alike = True
    with llama.serving(llama.converted(path, "f32", folder), torch.get_num_threads(), *map(str, options)) as ask:
        for text, prompt in zip(QUESTIONS, prompts, strict=False):
            drafter = head_drafter(head, Dynamic.chain(DRAFT_TOKENS))
            ours, answer = generate(target, prompt, NEW_TOKENS, Sampling(), drafter), ask(prompt, NEW_TOKENS)
            theirs, accepted = decoded(answer), sum(ours.stats.accepted_at_depth)
            counts = (ours.stats.steps, accepted, theirs.passes, answer["timings"].get("draft_n_accepted", 0))
            same = ours.tokens == theirs.tokens
            alike &= same and counts[:2] == counts[2:]
            table.add_row(text, str(len(ours.tokens)), *map(str, counts), "yes" if same else "no")
    Console(width=120).print(f"llama.cpp {llama.version}, float32, {DRAFT_TOKENS} draft tokens a pass", table)
    return alike


if __name__ == "__main__":
    sys.exit(0 if from_command_line(__doc__, run) else 1)
