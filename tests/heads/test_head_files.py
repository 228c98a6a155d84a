"""Laws of a saved head: it loads bit for bit, has the engines' names and keys, and is refused by any other target."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import assert_raises
from exported import EVERY_HEAD, LIMITED, edit_config, edit_tensors, logits, read_config, read_tensors
from torch import Tensor

from headstart.heads import files
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.target_config import Rope

HEADS = EVERY_HEAD | {
    "one key head": {"num_kv_heads": 1, "intermediate_size": 24},
    "eagle1 bias": {"kind": "eagle1", "num_kv_heads": 1, "fc_bias": True},
    "medusa without bias": {"kind": "medusa", "num_layers": 2, "bias": False},
    "low rank": {"kind": "medusa", "lm_head_rank": 4},
    "low rank limited": {"kind": "medusa", "lm_head_rank": 4, "vocab": LIMITED},
    "block of seven": {"kind": "block", "block_size": 7, "num_kv_heads": 4},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_loaded_head_gives_bit_identical_logits(make_head, frozen, tmp_path, name):
    """The scales of its inputs, powers of two, are folded into the weights. No random weights are drawn first."""
    head = make_head(**HEADS[name])
    inputs = head.fc.in_features if hasattr(head, "fc") else frozen.config.hidden_size
    head.input_scale = torch.tensor([4.0, 0.5]).repeat(inputs // 2)
    save_head(head, tmp_path / "head")
    before = torch.get_rng_state()
    loaded = load_head_for(tmp_path / "head", frozen)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(loaded) is type(head)
    assert loaded.shape == head.shape
    assert loaded.input_scale is None
    assert torch.equal(loaded.vocab.ids, head.vocab.ids)
    assert torch.equal(logits(loaded), logits(head))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def layer_tensors(layer: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Hidden size 32, 4 attention heads of size 8 with 2 key heads, intermediate size 40."""
    return {
        "fc.weight": (32, 3 * 32 if layer == "midlayer" else 2 * 32),
        f"{layer}.self_attn.q_proj.weight": (4 * 8, inputs),
        **{f"{layer}.self_attn.{name}_proj.weight": (2 * 8, inputs) for name in "kv"},
        f"{layer}.self_attn.o_proj.weight": (32, 4 * 8),
        **{f"{layer}.mlp.{name}_proj.weight": (40, 32) for name in ("gate", "up")},
        f"{layer}.mlp.down_proj.weight": (32, 40),
        f"{layer}.post_attention_layernorm.weight": (32,),
    }


EAGLE3_TENSORS = layer_tensors("midlayer", 2 * 32) | {
    "midlayer.input_layernorm.weight": (32,), "midlayer.hidden_norm.weight": (32,), "norm.weight": (32,),
    **{f"fc_norm.{number}.weight": (32,) for number in range(3)}, "lm_head.weight": (6, 32), "d2t": (6,), "t2d": (97,),
}  # fmt: skip
# No lm_head and no layers.0.input_layernorm, which vLLM refuses; a zero fc.bias, because SGLang would otherwise use an
# uninitialised one.
EAGLE1_TENSORS = layer_tensors("layers.0", 32) | {"fc.bias": (32,)}
LAYER_CONFIG = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "torch_dtype": "float32", "rope_theta": 10000.0, "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
NOTE = {"target_num_layers": 7, "calibration": {"greedy": [1.0], "sampled": [1.0], "noise": [1.0]}}
EAGLE3_CONFIG = LAYER_CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": 32, "draft_vocab_size": 6, "fc_norm": True,
    "norm_before_residual": False, "norm_before_fc": False, "norm_output": False,
    "headstart": {"kind": "eagle3", "taps": [2, 3, 4], **NOTE},
}  # fmt: skip
# No `bias`, for which vLLM would add a bias to the attention and leave it uninitialised.
EAGLE1_CONFIG = LAYER_CONFIG | {
    "architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"],
    "headstart": {"kind": "eagle1", "taps": [7], **NOTE},
}


@pytest.mark.parametrize(
    ("arguments", "shapes", "config"),
    [
        ({"vocab": LIMITED, "fc_norm": True}, EAGLE3_TENSORS, EAGLE3_CONFIG),
        ({"kind": "eagle1"}, EAGLE1_TENSORS, EAGLE1_CONFIG),
    ],
    ids=["eagle3", "eagle1"],
)
def test_tensors_and_config_have_the_names_and_keys_that_engines_read(make_head, tmp_path, arguments, shapes, config):
    save_head(make_head(**arguments), tmp_path / "head")
    tensors = read_tensors(tmp_path / "head")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert read_config(tmp_path / "head") == config
    if "d2t" in tensors:
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert (torch.arange(6) + tensors["d2t"]).tolist() == LIMITED.ids.tolist()  # offsets, not ids
        assert tensors["t2d"].nonzero().flatten().tolist() == LIMITED.ids.tolist()
    else:
        assert not tensors["fc.bias"].any()


@pytest.mark.parametrize(("taps", "num_layers"), [((1, 3, 6), 7), ((1, 6), 7), ((1, 2, 3), 5)])
def test_taps_that_engines_would_not_choose_are_written_in_both_countings(make_head, tmp_path, taps, num_layers):
    """vLLM uses the Hugging Face index; SGLang names the layer that outputs it, one less. Below 7 layers the engines'
    default 2, L//2, L-3 collides, so our own default is written too."""
    head = make_head(taps=taps)
    head.target = dataclasses.replace(head.target, num_layers=num_layers)
    assert (head.taps == head.target.default_taps()) == (num_layers == 5)
    save_head(head, tmp_path / "head")
    config, ids = read_config(tmp_path / "head"), "eagle_aux_hidden_state_layer_ids"
    assert config[ids] == [*taps]
    assert config["eagle_config"] == {ids: [tap - 1 for tap in taps]}
    assert config.get("num_aux_hidden_states", 3) == len(taps)


def test_a_published_heads_taps_are_its_top_level_ids_or_the_default(make_head, frozen, tmp_path):
    """Such a head has no section of ours, and here no t2d either."""
    for taps in ((2, 3, 4), (1, 3, 6)):
        head = make_head(taps=taps, vocab=LIMITED)
        save_head(head, tmp_path / "head")
        edit_config(tmp_path / "head", lambda config: config.pop("headstart"))
        edit_tensors(tmp_path / "head", lambda tensors: tensors.pop("t2d"))
        loaded = load_head_for(tmp_path / "head", frozen)
        assert loaded.taps == taps
        assert torch.equal(logits(loaded), logits(head))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [Rope(), Rope(500_000.0), Rope(10_000.0, "linear", {"factor": 4.0}), Rope(500_000.0, "llama3", LLAMA3)]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_a_rope_is_read_alike_from_either_spelling(rope: Rope) -> None:
    """The EAGLE authors train with base 10000 but serve with rope_theta; we use one value in both."""
    written = rope.to_config()
    assert Rope.from_config(written) == rope
    assert Rope.from_config({"rope_parameters": written["rope_parameters"]}) == rope
    before = {"rope_theta": written["rope_theta"], "rope_scaling": written["rope_scaling"]}
    assert Rope.from_config(before) == rope
    if rope.kind != "default":
        scaling = {"type" if name == "rope_type" else name: value for name, value in before["rope_scaling"].items()}
        assert Rope.from_config({**before, "rope_scaling": scaling}) == rope


def test_every_mismatch_with_another_target_is_named_at_once(head, frozen, tmp_path):
    save_head(head, tmp_path / "head")
    changes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 50, "num_layers": 3, "rope": Rope(5e5)}
    other = dataclasses.replace(frozen, config=dataclasses.replace(frozen.config, **changes))
    parts = "hidden_size: head 32, target 64 | vocab_size: head 97, target 50 | target_num_layers: head 7, target 3"
    parts += " | taps: head [2, 3, 4], target hidden_states 0 to 3 | rope: head {'theta': 10000.0"
    assert_raises(lambda: load_head_for(tmp_path / "head", other), f"{parts} | target {{'theta': 500000.0")


def test_a_killed_save_leaves_the_previous_head(make_head, frozen, tmp_path, monkeypatch):
    first, second = make_head(seed=1), make_head(seed=2)
    save_head(first, tmp_path / "head")

    def killed(tensors: dict[str, Tensor], path: Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            save_head(second, tmp_path / "head")
    assert torch.equal(logits(load_head_for(tmp_path / "head", frozen)), logits(first))
    save_head(second, tmp_path / "head")
    assert torch.equal(logits(load_head_for(tmp_path / "head", frozen)), logits(second))
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]


def test_a_published_eagle_1_head_is_loaded_if_its_embedding_is_the_targets(make_head, frozen, tmp_path):
    """It has a plain Llama's config.json, a bias, and a copy of the target's embedding in half precision."""
    head = make_head("eagle1", fc_bias=True)
    save_head(head, tmp_path / "head")

    def publish(config: dict[str, Any]) -> None:
        del config["headstart"], config["head_dim"]
        config.update(architectures=["LlamaForCausalLM"], bias=True)

    edit_config(tmp_path / "head", publish)
    edit_tensors(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": frozen.embedding.half()}))
    assert torch.equal(logits(load_head_for(tmp_path / "head", frozen)), logits(head))
    other = frozen.embedding.roll(1, dims=0).contiguous()
    edit_tensors(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": other}))
    said = f"{tmp_path / 'head'} | embed_tokens.weight is not the target's embedding"
    assert_raises(lambda: load_head_for(tmp_path / "head", frozen), said)
