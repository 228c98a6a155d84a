"""Laws of a saved head: it loads bit for bit, has the engines' names and keys, and is refused by any other target."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import files
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.kinds.eagle1 import Eagle1Head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.target_config import Rope
from headstart.heads.vocab import DraftVocab

MakeHead = Callable[..., Any]
LIMITED = DraftVocab(torch.tensor([0, 3, 4, 9, 50, 96]), 97)


def logits(head: Any, seq: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    tapped = len(head.taps) * head.target.hidden_size
    taps = torch.randn(1, seq, tapped, generator=generator).to(head.embedding.dtype)
    tokens = torch.randint(97, (1, seq), generator=generator)
    return head.logits(head(head.project(taps), tokens, torch.arange(seq)))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path, frozen: FrozenTarget) -> str:
    with pytest.raises(ValueError, match=str(folder)) as error:
        load_head_for(folder, frozen)
    return str(error.value)


@pytest.mark.parametrize("vocab", [None, LIMITED], ids=["full", "limited"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"num_kv_heads": 1, "intermediate_size": 24},
        {"taps": (0, 5)},
        {"taps": (0, 1, 3, 6, 7), "fc_norm": True},
        {"hidden_size": 24, "own_embedding": True},
    ],
    ids=str,
)
def test_a_loaded_head_gives_bit_identical_logits(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, shape: dict[str, Any], vocab: DraftVocab | None
) -> None:
    head = make_head(vocab=vocab, **shape)
    save_head(head, tmp_path / "head")
    loaded = load_head_for(tmp_path / "head", frozen)
    assert isinstance(loaded, Eagle3Head)
    assert loaded.shape == head.shape
    assert torch.equal(loaded.vocab.ids, head.vocab.ids)
    assert torch.equal(logits(loaded), logits(head))
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "peagle", "medusa", "block"])
def test_loading_a_head_does_not_wait_for_random_weights(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, kind: str
) -> None:
    head = make_head(kind)
    save_head(head, tmp_path / "head")
    before = torch.get_rng_state()
    loaded = load_head_for(tmp_path / "head", frozen)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(own, loaded.state_dict()[name]) for name, own in head.state_dict().items())


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_loaded_head_has_the_dtype_of_the_targets_embedding(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, kind: str
) -> None:
    head = make_head(kind)
    save_head(head, tmp_path / "head")
    in_half = FrozenTarget.from_folder(target_folder, torch.bfloat16)
    loaded = load_head_for(tmp_path / "head", in_half)
    assert {tensor.dtype for tensor in (*loaded.parameters(), *loaded.buffers())} == {torch.bfloat16}
    save_head(loaded, tmp_path / "half")
    assert read_config(tmp_path / "half")["torch_dtype"] == "bfloat16"
    again = load_head_for(tmp_path / "half", in_half)
    assert torch.equal(logits(again), logits(loaded))


def test_tensors_have_the_engines_names_and_shapes(make_head: MakeHead, tmp_path: Path) -> None:
    """Hidden size 32, three taps, 4 attention heads of size 8 with 2 key heads, intermediate size 40."""
    save_head(make_head(vocab=LIMITED), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 3 * 32),
        "midlayer.self_attn.q_proj.weight": (4 * 8, 2 * 32),
        "midlayer.self_attn.k_proj.weight": (2 * 8, 2 * 32),
        "midlayer.self_attn.v_proj.weight": (2 * 8, 2 * 32),
        "midlayer.self_attn.o_proj.weight": (32, 4 * 8),
        "midlayer.mlp.gate_proj.weight": (40, 32),
        "midlayer.mlp.up_proj.weight": (40, 32),
        "midlayer.mlp.down_proj.weight": (32, 40),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (6, 32),
        "d2t": (6,),
        "t2d": (97,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert (torch.arange(6) + tensors["d2t"]).tolist() == LIMITED.ids.tolist()  # offsets, not ids
    assert tensors["t2d"].nonzero().flatten().tolist() == LIMITED.ids.tolist()


def test_config_has_the_keys_that_engines_read(make_head: MakeHead, tmp_path: Path) -> None:
    save_head(make_head(vocab=LIMITED, fc_norm=True), tmp_path / "head")
    assert read_config(tmp_path / "head") == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "draft_vocab_size": 6,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "headstart": {
            "kind": "eagle3",
            "taps": [2, 3, 4],
            "target_num_layers": 7,
            "calibration": {"greedy": [1.0], "sampled": [1.0], "noise": [1.0]},
        },
    }


def test_taps_other_than_the_default_are_written_in_both_countings(make_head: MakeHead, tmp_path: Path) -> None:
    """vLLM uses the Hugging Face index; SGLang names the layer that outputs it, one less."""
    save_head(make_head(taps=(1, 3, 6)), tmp_path / "other")
    config = read_config(tmp_path / "other")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert "num_aux_hidden_states" not in config
    save_head(make_head(taps=(1, 6)), tmp_path / "two")
    assert read_config(tmp_path / "two")["num_aux_hidden_states"] == 2


def test_the_default_taps_of_a_small_target_are_written_too(make_head: MakeHead, tmp_path: Path) -> None:
    """Below 7 layers the engines' default 2, L//2, L-3 collides, so no engine would pick our taps by default."""
    head = make_head(taps=(1, 2, 3))
    head.target = dataclasses.replace(head.target, num_layers=5)
    assert head.taps == head.target.default_taps()
    save_head(head, tmp_path / "head")
    assert read_config(tmp_path / "head")["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_a_published_heads_taps_are_its_top_level_ids_or_the_default(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    """Such a head has no section of ours, and here no t2d either."""
    for taps in ((2, 3, 4), (1, 3, 6)):
        head = make_head(taps=taps, vocab=LIMITED)
        save_head(head, tmp_path / "head")
        config = read_config(tmp_path / "head")
        del config["headstart"]
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        edit_tensors(tmp_path / "head", lambda tensors: tensors.pop("t2d"))
        loaded = load_head_for(tmp_path / "head", frozen)
        assert loaded.taps == taps
        assert torch.equal(logits(loaded), logits(head))


@pytest.mark.parametrize(
    "rope",
    [
        Rope(),
        Rope(500_000.0),
        Rope(10_000.0, "linear", {"factor": 4.0}),
        Rope(500_000.0, "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ],
    ids=str,
)
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


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hidden size": ({"hidden_size": 64}, ["hidden_size: head 32, target 64"]),
    "vocabulary": ({"vocab_size": 50}, ["vocab_size: head 97, target 50"]),
    "layers": ({"num_layers": 8}, ["target_num_layers: head 7, target 8"]),
    "taps": (
        {"num_layers": 3},
        ["target_num_layers: head 7, target 3", "taps: head [2, 3, 4], target hidden_states 0 to 3"],
    ),
    "rope base": ({"rope": Rope(5e5)}, ["rope: head {'theta': 10000.0", "target {'theta': 500000.0"]),
    "rope scaling": (
        {"rope": Rope(10000.0, "linear", {"factor": 4.0})},
        ["'kind': 'default', 'scaling': {}}", "'kind': 'linear', 'scaling': {'factor': 4.0}}"],
    ),
}
CHANGES["everything at once"] = (
    {"hidden_size": 64, "vocab_size": 50, "num_layers": 3, "rope": Rope(5e5)},
    [part for name in ("hidden size", "vocabulary", "taps", "rope base") for part in CHANGES[name][1]],
)


@pytest.mark.parametrize("name", CHANGES)
def test_a_head_for_another_target_is_refused_with_both_values(
    head: Eagle3Head, frozen: FrozenTarget, tmp_path: Path, name: str
) -> None:
    changes, parts = CHANGES[name]
    save_head(head, tmp_path / "head")
    message = refusal(
        tmp_path / "head", dataclasses.replace(frozen, config=dataclasses.replace(frozen.config, **changes))
    )
    assert all(part in message for part in parts), message
    unchanged = {"hidden_size", "vocab_size", "target_num_layers", "rope", "taps"} - {
        part.partition(":")[0] for part in parts
    }
    if not name.startswith("rope"):
        assert not any(f"{field}: head" in message for field in unchanged), message


def test_missing_misshapen_and_unknown_tensors_are_named_at_once(
    head: Eagle3Head, frozen: FrozenTarget, tmp_path: Path
) -> None:
    save_head(head, tmp_path / "head")

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["fc.weight"], tensors["midlayer.hidden_norm.weight"]
        tensors["norm.weight"] = torch.ones(31)
        tensors["model.lm_head.weight"] = tensors.pop("lm_head.weight")

    edit_tensors(tmp_path / "head", damage)
    message = refusal(tmp_path / "head", frozen)
    assert message.endswith(
        "model.safetensors: fc.weight is missing; lm_head.weight is missing; "
        "midlayer.hidden_norm.weight is missing; model.lm_head.weight is unknown; "
        "norm.weight is [31] but should be [32]; exactly the tensors that config.json describes are allowed: copy or "
        "export the head again"
    )


def test_a_head_that_lost_its_d2t_is_refused(make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path) -> None:
    """In engines none of its draft tokens is accepted and no error is raised; the shape of lm_head gives it away."""
    save_head(make_head(vocab=LIMITED), tmp_path / "head")
    edit_tensors(tmp_path / "head", lambda tensors: tensors.pop("d2t"))
    message = refusal(tmp_path / "head", frozen)
    assert "lm_head.weight is [6, 32] but should be [97, 32]" in message


@pytest.mark.parametrize("ids", [[0, 3, 4, 9, 50, 96], [0, 3, 4, 9, 50, 60]], ids=str)
def test_a_d2t_of_ids_instead_of_offsets_is_refused(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, ids: list[int]
) -> None:
    """Read as offsets, such ids may lead to valid target ids; then t2d gives them away."""
    save_head(make_head(vocab=DraftVocab(torch.tensor(ids), 97)), tmp_path / "head")
    edit_tensors(tmp_path / "head", lambda tensors: tensors.update(d2t=torch.tensor(ids)))
    with pytest.raises(ValueError, match="must hold offsets: target id minus draft id"):
        load_head_for(tmp_path / "head", frozen)


@pytest.mark.parametrize("kept_bytes", [0, 7, 500, -1])
def test_a_truncated_file_is_refused_by_name(
    head: Eagle3Head, frozen: FrozenTarget, tmp_path: Path, kept_bytes: int
) -> None:
    save_head(head, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert f"{path} cannot be read" in refusal(tmp_path / "head", frozen)


def test_a_folder_without_a_head_is_refused_by_name(head: Eagle3Head, frozen: FrozenTarget, tmp_path: Path) -> None:
    assert "holds no head (no config.json)" in refusal(tmp_path / "head", frozen)
    save_head(head, tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").unlink()
    assert "model.safetensors cannot be read" in refusal(tmp_path / "head", frozen)


def test_saving_again_replaces_the_head_and_leaves_no_other_files(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    for seed in (1, 2):
        save_head(make_head(seed=seed), tmp_path / "runs" / "head")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["head"]
    assert sorted(path.name for path in (tmp_path / "runs" / "head").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_head_for(tmp_path / "runs" / "head", frozen)
    assert torch.equal(logits(loaded), logits(make_head(seed=2)))


def test_a_killed_save_leaves_the_previous_head(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# EAGLE-1


def test_a_loaded_eagle_1_head_gives_bit_identical_logits(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    for bias in (False, True):
        head = make_head("eagle1", num_kv_heads=1, fc_bias=bias)
        save_head(head, tmp_path / "head")
        loaded = load_head_for(tmp_path / "head", frozen)
        assert isinstance(loaded, Eagle1Head)
        assert loaded.shape == head.shape
        assert torch.equal(logits(loaded), logits(head))
        assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_tensors_of_eagle_1_have_the_engines_names_and_shapes(make_head: MakeHead, tmp_path: Path) -> None:
    """No lm_head and no layers.0.input_layernorm, which vLLM refuses; a zero fc.bias, because SGLang would otherwise
    use an uninitialised one."""
    save_head(make_head("eagle1"), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 2 * 32),
        "fc.bias": (32,),
        "layers.0.self_attn.q_proj.weight": (4 * 8, 32),
        "layers.0.self_attn.k_proj.weight": (2 * 8, 32),
        "layers.0.self_attn.v_proj.weight": (2 * 8, 32),
        "layers.0.self_attn.o_proj.weight": (32, 4 * 8),
        "layers.0.mlp.gate_proj.weight": (40, 32),
        "layers.0.mlp.up_proj.weight": (40, 32),
        "layers.0.mlp.down_proj.weight": (32, 40),
        "layers.0.post_attention_layernorm.weight": (32,),
    }
    assert not tensors["fc.bias"].any()


def test_config_of_eagle_1_has_the_keys_that_engines_read(make_head: MakeHead, tmp_path: Path) -> None:
    """It has no `bias`, for which vLLM would add a bias to the attention and leave it uninitialised."""
    save_head(make_head("eagle1"), tmp_path / "head")
    assert read_config(tmp_path / "head") == {
        "architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "headstart": {
            "kind": "eagle1",
            "taps": [7],
            "target_num_layers": 7,
            "calibration": {"greedy": [1.0], "sampled": [1.0], "noise": [1.0]},
        },
    }


def published(folder: Path, **changes: Any) -> None:
    """Make a saved head look like a published one, with a plain Llama's config.json."""
    config = {**read_config(folder), "architectures": ["LlamaForCausalLM"], **changes}
    for ours in ("headstart", "head_dim"):
        del config[ours]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_published_eagle_1_head_can_be_loaded(make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path) -> None:
    """It has a bias, and a copy of the target's embedding in half precision."""
    head = make_head("eagle1", fc_bias=True)
    save_head(head, tmp_path / "head")
    published(tmp_path / "head", bias=True)
    edit_tensors(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": frozen.embedding.half()}))
    loaded = load_head_for(tmp_path / "head", frozen)
    assert isinstance(loaded, Eagle1Head)
    assert torch.equal(logits(loaded), logits(head))


def test_an_eagle_1_head_with_an_embedding_unlike_the_targets_is_refused(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    save_head(make_head("eagle1"), tmp_path / "head")
    other = frozen.embedding.roll(1, dims=0).contiguous()
    edit_tensors(tmp_path / "head", lambda t: t.update({"embed_tokens.weight": other}))
    assert "embed_tokens.weight is not the target's embedding" in refusal(tmp_path / "head", frozen)


def test_a_head_of_another_width_without_its_own_embedding_is_refused(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    save_head(make_head(hidden_size=24, own_embedding=True), tmp_path / "head")
    edit_tensors(tmp_path / "head", lambda t: t.pop("embed_tokens.weight"))
    assert "embed_tokens.weight is missing" in refusal(tmp_path / "head", frozen)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"headstart": {"kind": "mlp"}}, "a head of kind 'mlp'; only eagle1, eagle3, peagle"),
        ({"intermediate_size": None}, "config.json lacks intermediate_size"),
        (
            {"headstart": {"kind": "eagle1", "calibration": {"greedy": [0.0], "sampled": [1.0], "noise": []}}},
            "calibration.greedy.0: 0.0 given",
        ),
        (
            {"headstart": {"kind": "eagle1", "calibration": {"greedy": [1.0], "sampled": [1.0], "noise": []}}},
            "calibration.noise: [] given",
        ),
    ],
)
def test_a_config_with_wrong_values_is_refused_by_key(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    save_head(make_head("eagle1"), tmp_path / "head")
    config = {**read_config(tmp_path / "head"), **changes}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    assert part in refusal(tmp_path / "head", frozen)


@pytest.mark.parametrize(("text", "part"), [("{", "is not JSON"), ("[]", "holds a list; a JSON object is allowed")])
def test_a_config_that_is_not_a_json_object_is_refused(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path, text: str, part: str
) -> None:
    save_head(make_head(), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(text)
    assert part in refusal(tmp_path / "head", frozen)
