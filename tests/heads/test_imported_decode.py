"""Law: a head in its authors' layout, written under the names that they document, drafts the same after conversion.

The heads are for the bundled target: its EAGLE-3 head without the norms of 3.1, and untrained EAGLE-1 and Medusa heads,
whose logits tell more than their few accepted tokens.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow_unless
from torch import Tensor

from headstart.heads.base import DraftHead, LevelHead
from headstart.heads.formats.convert import convert
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for
from headstart.heads.kinds.eagle1 import Eagle1Head, Eagle1Shape
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.kinds.medusa import MedusaHead, MedusaShape
from headstart.heads.vocab import DraftVocab
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.schema import TargetSection

ASSETS = Path(__file__).parents[2] / "assets"
TARGET, HEAD = ASSETS / "demo_target", ASSETS / "demo_head"
ATTENTION_AND_MLP = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]
EAGLE3_NAMES = [
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    *(f"midlayer.{name}" for name in ATTENTION_AND_MLP),
    "norm.weight",
    "lm_head.weight",
]
Published = tuple[DraftHead, dict[str, Any], str, dict[str, Tensor]]  # head, config.json, name of weights file, tensors


def eagle3(frozen: FrozenTarget) -> Published:
    """Drafts two thirds of the vocabulary."""
    old = load_head_for(HEAD, frozen)
    assert isinstance(old, Eagle3Head)
    ids = torch.tensor([token for token in range(frozen.config.vocab_size) if token % 3])
    vocab = DraftVocab(ids, frozen.config.vocab_size)
    shape = dataclasses.replace(old.shape, fc_norm=False, norm_output=False)
    head = Eagle3Head(shape, frozen.config, vocab, frozen.embedding).requires_grad_(False)
    state = {**old.state_dict(), "fc.weight": old.fc.weight / 16, "lm_head.weight": old.lm_head.weight[ids]}
    tensors = {name: state[name] for name in EAGLE3_NAMES}
    head.load_state_dict(tensors)
    t2d = torch.tensor([token % 3 != 0 for token in range(frozen.config.vocab_size)])
    d2t = ids - torch.arange(len(ids))
    config = llama(frozen) | {"draft_vocab_size": len(ids)}
    return head, config, "pytorch_model.bin", {**tensors, "d2t": d2t, "t2d": t2d}


def eagle1(frozen: FrozenTarget) -> Published:
    config = frozen.config
    shape = Eagle1Shape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    head = Eagle1Head(shape, frozen).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.02 * torch.randn(each.shape, generator=generator) for name, each in head.state_dict().items()}
    state["layers.0.post_attention_layernorm.weight"] += 1
    head.load_state_dict(state)
    tensors = {name: state[name] for name in ("fc.weight", *(f"layers.0.{name}" for name in ATTENTION_AND_MLP))}
    tensors["embed_tokens.weight"] = frozen.embedding.half()
    return head, llama(frozen) | {"bias": False}, "pytorch_model.bin", tensors


def medusa(frozen: FrozenTarget) -> Published:
    shape = MedusaShape(frozen.config.hidden_size, num_heads=3, num_layers=1)
    head = MedusaHead(shape, frozen, DraftVocab.full(frozen.config.vocab_size)).requires_grad_(False)
    tensors: dict[str, Tensor] = {}
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        weight = 0.02 * torch.randn(shape.hidden_size, shape.hidden_size, generator=generator)
        bias = 0.02 * torch.randn(shape.hidden_size, generator=generator)
        ours = {f"blocks.{number}.layers.0.weight": weight, f"blocks.{number}.layers.0.bias": bias}
        head.load_state_dict({**head.state_dict(), **ours, f"lm_heads.{number}.weight": frozen.lm_head})
        tensors |= {f"{number}.0.linear.weight": weight, f"{number}.0.linear.bias": bias}
        tensors[f"{number}.1.weight"] = frozen.lm_head
    return head, {"medusa_num_heads": 3, "medusa_num_layers": 1}, "medusa_lm_head.pt", tensors


def llama(frozen: FrozenTarget) -> dict[str, Any]:
    """config.json as the EAGLE authors write it."""
    target = frozen.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_positions,
    }


def logits(head: DraftHead) -> Tensor:
    assert isinstance(head, LevelHead)
    generator = torch.Generator().manual_seed(7)
    taps = torch.randn(1, 6, len(head.taps) * head.target.hidden_size, generator=generator)
    tokens = torch.randint(head.target.vocab_size, (1, 6), generator=generator)
    return head.logits(head(head.project(taps), tokens, torch.arange(6)))


@pytest.mark.parametrize(
    ("publish", "least"), slow_unless([(eagle3, 1.2)], [(eagle3, 1.2), (eagle1, 1.0), (medusa, 1.0)])
)
def test_a_published_head_has_the_same_acceptance_length_before_and_after_conversion(
    publish: Callable[[FrozenTarget], Published], least: float, tmp_path: Path
) -> None:
    head, config, file, tensors = publish(FrozenTarget.from_folder(TARGET, torch.float32))
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "published" / file)
    convert(tmp_path / "published", tmp_path / "back", str(TARGET))
    target = TargetModel.load(TargetSection(path=str(TARGET), dtype="float32"), head.taps)
    back = load_head_for(tmp_path / "back", target.frozen)
    assert torch.equal(logits(back), logits(head))
    prompt = load_tokenizer(TARGET).encode("def read(self, path):\n")
    drafters = [head_drafter(each, Dynamic.chain(3)) for each in (head, back)]
    before, after = (generate(target, prompt, 24, drafter=drafter) for drafter in drafters)
    assert after.tokens == before.tokens
    assert after.stats.accepted_at_depth == before.stats.accepted_at_depth
    assert after.stats.acceptance_length == before.stats.acceptance_length >= least
