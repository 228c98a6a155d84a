"""Helpers for the tests of head formats: heads of every kind, their exports, and edits to their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.formats.export import CONVERTER, export
from headstart.heads.formats.layouts import files_in_format
from headstart.heads.formats.subject import ServedTarget
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.checkpoint import save_head
from headstart.heads.vocab import DraftVocab
from headstart.recipes import Recipe

LIMITED = DraftVocab(torch.tensor([0, 3, 4, 9, 50, 96]), 97)
EVERY_HEAD: dict[str, dict[str, Any]] = {  # name -> arguments of make_head
    "eagle3": {},
    "limited": {"vocab": LIMITED},
    "3.1": {"fc_norm": True, "norm_output": True},
    "taps": {"taps": (1, 3, 6), "vocab": LIMITED},
    "five taps": {"taps": (0, 1, 3, 5, 6), "fc_norm": True},
    "narrow": {"hidden_size": 24, "own_embedding": True},
    "norm before fc": {"norm_before_fc": True},
    # Published heads do not say how deep they were trained.
    "peagle": {"kind": "peagle", "fc_norm": True, "depths": None},
    "peagle limited": {"kind": "peagle", "num_layers": 3, "vocab": LIMITED, "mask_token_id": 95, "depths": None},
    "eagle1": {"kind": "eagle1"},
    "medusa": {"kind": "medusa"},
    "medusa layers": {"kind": "medusa", "num_layers": 2},
    "medusa limited": {"kind": "medusa", "vocab": LIMITED},
    "dspark": {"kind": "block", "markov_rank": 6, "markov_gate": True},
    "dspark limited": {"kind": "block", "markov_rank": 6, "vocab": LIMITED, "mask_token_id": 95},
    "dflash": {"kind": "block", "sample_from_anchor": False, "reaches": (Reach(3, causal=True), Reach())},
    "jetspec": {"kind": "block", "reaches": (Reach(causal=True),), "vocab": LIMITED, "mask_token_id": 7},
}


def recipe_of(run: Path, target: Path, kind: str = "eagle3", **export_fields: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run_dir": str(run),
            "target": {"path": str(target), "dtype": "float32"},
            "data": {"prompts": "none.jsonl", "heldout_prompts": "none.jsonl", "num_prompts": 8},
            "head": {"kind": kind},
            "train": {"steps": 10, "unroll": 4},  # a level for each Medusa head
            "decode": {"growth": "chain", "depth": 3},
            "export": export_fields,
        }
    )


def exported(head: DraftHead, run: Path, target: Path, name: str, /, **fields: Any) -> Path:
    """Save the head, export it in the named format and return the export's folder."""
    save_head(head, run / "head")
    return export(recipe_of(run, target, head.kind, format=name, **fields))


def files_in_memory(head: DraftHead, name: str) -> HeadFiles:
    config, tensors = files_in_format(name, head, ServedTarget("target", ["LlamaForCausalLM"], draft_tokens=3))
    return HeadFiles(Path("head"), json.loads(json.dumps(config)), {key: each.clone() for key, each in tensors.items()})


def pretended_converter(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A command in place of llama.cpp's converter, which writes its own arguments as the GGUF file."""
    command = folder / CONVERTER
    command.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    command.chmod(0o755)
    patch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    return command


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def logits(head: DraftHead) -> Tensor:
    """The logits of three levels for a fixed text. [levels * choices, draft_vocab]"""
    generator = torch.Generator().manual_seed(7)
    tapped = len(head.taps) * head.target.hidden_size
    taps = torch.randn(1, 6, tapped, generator=generator).to(head.embedding.dtype)
    text = torch.randint(97, (1, 7), generator=generator)
    return torch.cat([*head.text_logits(head.project(taps), text, min(3, head.max_levels or 3))])


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = read_config(folder)
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = read_tensors(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    forms = [{name: tensor.dtype for name, tensor in each.items()} for each in (one, other)]
    return forms[0] == forms[1] and all(torch.equal(one[name], other[name]) for name in one)
