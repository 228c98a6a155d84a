"""Laws of FrozenTarget: read from files alone, it gives the target's own logits, or says what is missing."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.inference.targets.model import TargetModel

TOKENS = torch.tensor([[5, 6, 7, 11, 3, 30], [1, 1, 2, 3, 5, 8]])
INDEX = "model.safetensors.index.json"
MakeModel = Callable[..., LlamaForCausalLM]


def assert_own_logits(model: PreTrainedModel, folder: Path) -> None:
    """The last hidden state before the final norm, through the frozen norm and lm_head, gives the model's logits."""
    output = TargetModel(model, ()).forward(TOKENS)
    frozen = FrozenTarget.from_folder(folder, torch.float32)
    torch.testing.assert_close(frozen.logits(output.last_hidden), output.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(frozen.choices(output.last_hidden), output.logits.argmax(-1))
    assert torch.equal(frozen.embedding, model.get_input_embeddings().state_dict()["weight"])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single file", "sharded"])
def test_the_frozen_tensors_give_the_targets_own_logits(
    make_model: MakeModel, tmp_path: Path, tied: bool, sharded: bool
) -> None:
    model = make_model(tie_word_embeddings=tied, rms_norm_eps=0.1)  # large enough to matter
    torch.nn.init.normal_(model.model.norm.weight)  # new norms are all ones, which would hide a missing norm
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / INDEX).is_file() == sharded
    assert_own_logits(model, tmp_path)
    frozen = FrozenTarget.from_folder(tmp_path, torch.float32)
    assert (frozen.lm_head is frozen.embedding) == tied


SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma, norms of 1 + weight": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "gemma2, softcapped": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)),
    "gpt2, norms with a bias": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
    ),
    "gpt_neox, other names": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{name: SIZES[name] for name in SIZES.keys() - {"num_key_value_heads", "head_dim"}})
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_gives_its_own_logits(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and ("norm" in name or "ln_f" in name):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    assert_own_logits(model, tmp_path)


def without(folder: Path, name: str) -> None:
    """Remove a tensor from a single-file checkpoint."""
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "final norm"),
        ("lm_head.weight", "lm_head"),  # config.json says untied, so the embedding does not replace it
    ],
)
def test_a_missing_tensor_is_named(make_model: MakeModel, tmp_path: Path, name: str, what: str) -> None:
    make_model().save_pretrained(tmp_path)
    without(tmp_path, name)
    with pytest.raises(ValueError, match=f"no {what} among its tensors .*{name}"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("kept_bytes", [0, 4, 1000, -1])
@pytest.mark.parametrize("sharded", [False, True], ids=["single file", "sharded"])
def test_a_truncated_file_is_refused_by_name(
    make_model: MakeModel, tmp_path: Path, sharded: bool, kept_bytes: int
) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    name = "model.safetensors"
    if sharded:
        name = json.loads((tmp_path / INDEX).read_text())["weight_map"]["lm_head.weight"]
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=f"{name} cannot be read .*copy or download the target again"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


def test_a_missing_shard_is_refused_by_name(make_model: MakeModel, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    name = json.loads((tmp_path / INDEX).read_text())["weight_map"]["model.norm.weight"]
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


def test_pickled_weights_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"neither model\.safetensors .*pickled weights are not read"):
        FrozenTarget.from_folder(tmp_path, torch.float32)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        TargetConfig.from_folder(tmp_path)


def test_the_config_read_from_files_equals_that_of_the_loaded_model(target: TargetModel, target_folder: Path) -> None:
    assert TargetConfig.from_folder(target_folder) == target.config
    assert locate_target(str(target_folder)) == target_folder


def test_default_taps_are_distinct_ascending_and_exist(target: TargetModel) -> None:
    for num_layers in range(1, 81):
        taps = dataclasses.replace(target.config, num_layers=num_layers).default_taps()
        assert list(taps) == sorted(set(taps))
        assert len(taps) == min(3, num_layers + 1)
        assert 0 <= taps[0] < taps[-1] <= num_layers
        if num_layers >= 7:
            assert taps == (2, num_layers // 2, num_layers - 3)  # every engine's default
