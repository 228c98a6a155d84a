"""Laws of block heads' files: published ones are converted or refused by name, lint knows the traps of every engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import EVERY_HEAD, LIMITED, edit_config, edit_tensors, exported, read_config

from headstart.heads.formats.convert import convert
from headstart.heads.formats.lint import lint
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Blocks, Reach
from headstart.heads.kinds.checkpoint import load_head_for, save_head

MakeHead = Callable[..., Any]
Config = dict[str, Any]
Edit = Callable[[Config], object]


def nested(**values: Any) -> Edit:
    return lambda config: config["dflash_config"].update(values)


def drop(*keys: str) -> Edit:
    def forget(config: Config) -> None:
        for key in keys:
            config.pop(key, None)
            config.get("dflash_config", {}).pop(key, None)

    return forget


def as_the_dflash_authors_write_it(config: Config) -> None:
    """Only what DFlash's own files hold, the block's keys in their section."""
    kept = {"architectures", "model_type", "block_size", "num_target_layers", "num_hidden_layers", "layer_types"}
    kept |= {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    kept |= {"rms_norm_eps", "rope_theta", "max_position_embeddings", "sliding_window", "dflash_config", "hidden_act"}
    for key in config.keys() - kept:
        del config[key]
    for key in config["dflash_config"].keys() - {"mask_token_id", "target_layer_ids"}:
        del config["dflash_config"][key]


def as_deepspec_writes_it(config: Config) -> None:
    """The block's keys at the top level, and no word about the slot convention."""
    for key in ("headstart", "dflash_config", "sample_from_anchor", "draft_vocab_size", "is_causal"):
        del config[key]


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        ("dflash", as_the_dflash_authors_write_it, "sample_from_anchor: missing, so false"),
        ("dspark", as_deepspec_writes_it, "sample_from_anchor: missing, so true"),
    ],
)
def test_published_heads_keep_the_convention_of_their_authors(
    make_head: MakeHead,
    target_folder: Path,
    frozen: FrozenTarget,
    tmp_path: Path,
    kind: str,
    edit: Edit,
    said: str,
) -> None:
    head = make_head(**EVERY_HEAD[kind])
    folder = exported(head, tmp_path, target_folder, "vllm")
    edit_config(folder, edit)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": frozen.embedding.clone()}))
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": frozen.lm_head.clone()}))
    inferred = convert(folder, tmp_path / "back", str(target_folder))
    assert any(line.startswith(said) for line in inferred)
    assert {"embed_tokens.weight: a copy of the target's, left out"} < set(inferred)
    back = load_head_for(tmp_path / "back", frozen)
    assert isinstance(back, BlockHead)
    assert back.shape == head.shape
    taps, tokens = torch.randn(1, 9, 96), torch.randint(97, (1, 9))
    blocks = Blocks.at_every_position(9)
    states, wanted = (each.text_states(each.project(taps), tokens, blocks) for each in (back, head))
    assert torch.equal(states, wanted)
    before = torch.randint(97, states.shape[:2])
    assert torch.equal(back.logits(states, before), head.logits(wanted, before))


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (drop("target_layer_ids"), "target_layer_ids: missing; vLLM takes"),
        (drop("mask_token_id"), "mask_token_id"),
        (lambda config: config.update(num_target_layers=36), "num_target_layers: 36 found; the target's 7"),
        (lambda config: config.update(markov_head_type="rnn"), "markov_head_type 'rnn'"),
        (nested(projector_type="domino"), "projector_type 'domino'"),
        (lambda config: config.update(selector_rank=256), "selector_rank 256: only 0 is allowed"),
        (nested(conv_kernel_size=2), "conv_kernel_size 2: only 0 is allowed"),
        (nested(final_logit_softcapping=30.0), "final_logit_softcapping 30.0: only None is allowed"),
        (lambda config: config.update(output_multiplier=0.5), "output_multiplier 0.5: only 1 is allowed"),
    ],
)
def test_what_a_block_head_of_ours_cannot_do_is_refused_by_name(
    make_head: MakeHead, target_folder: Path, tmp_path: Path, edit: Edit, part: str
) -> None:
    folder = exported(make_head(**EVERY_HEAD["dspark"]), tmp_path, target_folder, "vllm")
    edit_config(folder, lambda config: config.pop("headstart"))
    edit_config(folder, edit)
    with pytest.raises(ValueError, match=part):
        convert(folder, tmp_path / "back", str(target_folder))
    assert not (tmp_path / "back").exists()


def test_a_head_that_asks_for_another_computation_is_not_loaded(
    make_head: MakeHead, frozen: FrozenTarget, tmp_path: Path
) -> None:
    save_head(make_head(**EVERY_HEAD["dflash"]), tmp_path / "head")
    edit_config(tmp_path / "head", lambda config: config.update(selector_rank=256, output_multiplier=0.5))
    with pytest.raises(ValueError, match=r"selector_rank 256: only 0 is allowed; output_multiplier 0\.5: only 1"):
        load_head_for(tmp_path / "head", frozen)


def test_a_speculators_head_without_its_slot_convention_is_refused(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    folder = exported(make_head(**EVERY_HEAD["dspark"]), tmp_path, target_folder, "speculators")
    edit_config(folder, lambda config: config.pop("sample_from_anchor"))
    with pytest.raises(ValueError, match="sample_from_anchor: missing; vLLM takes false, speculators true"):
        convert(folder, tmp_path / "back", str(target_folder))


CAUSAL = "causal within the block, unlike in training"
WHOLE, WINDOW = Reach(), Reach(window=3)
CAUSAL_WHOLE, CAUSAL_WINDOW = Reach(causal=True), Reach(window=3, causal=True)


@pytest.mark.parametrize(
    ("reaches", "name", "edit", "engines"),
    [
        ((WHOLE, WHOLE), "vllm", None, set()),
        ((WINDOW, WINDOW), "vllm", None, set()),
        ((WHOLE, WINDOW), "vllm", None, set()),
        ((CAUSAL_WINDOW, WHOLE), "vllm", None, set()),
        ((CAUSAL_WHOLE, CAUSAL_WINDOW), "vllm", None, set()),
        ((WHOLE, WHOLE), "speculators", None, set()),
        ((WINDOW, WINDOW), "speculators", None, set()),
        ((CAUSAL_WINDOW, CAUSAL_WINDOW), "speculators", None, set()),
        ((CAUSAL_WINDOW, WHOLE), "speculators", None, {"vllm"}),
        ((WHOLE, WHOLE), "speculators", lambda config: forget_causality(config, non_causal=False), {"vllm"}),
        ((WINDOW, WINDOW), "vllm", lambda config: config.update(is_causal=True), {"vllm", "sglang"}),
        ((WINDOW, WINDOW), "vllm", drop("is_causal"), {"sglang"}),  # which does not read dflash_config.causal
        ((WINDOW, WINDOW), "vllm", drop("is_causal", "causal"), {"vllm", "sglang"}),
        ((CAUSAL_WHOLE,), "vllm", lambda config: config.update(is_causal=None), {"sglang"}),
    ],
)
def test_every_engine_makes_the_layers_causal_that_were_trained_so(
    make_head: MakeHead,
    target_folder: Path,
    frozen: FrozenTarget,
    tmp_path: Path,
    reaches: tuple[Reach, ...],
    name: str,
    edit: Edit | None,
    engines: set[str],
) -> None:
    """`is_causal` rules all layers in vLLM and SGLang; `sliding_window_non_causal` too where vLLM reads speculators'
    layout."""
    head = make_head("block", sample_from_anchor=False, reaches=reaches)
    folder = exported(head, tmp_path, target_folder, name)
    if edit is not None:
        edit_config(folder, edit)
    found = lint(folder, str(target_folder), ["vllm", "speculators" if name == "speculators" else "sglang"])
    assert {each.engine for each in found if CAUSAL in each.text} == engines, list(map(str, found))
    if edit is None:
        convert(folder, tmp_path / "back", str(target_folder))
        back = load_head_for(tmp_path / "back", frozen)
        assert isinstance(back, BlockHead)
        assert back.shape.reaches == reaches


def forget_causality(config: Config, non_causal: bool) -> None:
    """As speculators writes a head whose layers have no window."""
    del config["transformer_layer_config"]["is_causal"]
    config["sliding_window_non_causal"] = non_causal


def test_an_export_names_taps_slots_and_mask_in_each_engines_own_counting(
    make_head: MakeHead, target_folder: Path, tmp_path: Path
) -> None:
    head = make_head(**EVERY_HEAD["dspark limited"])
    flat = read_config(exported(head, tmp_path / "one", target_folder, "vllm"))
    assert flat["target_layer_ids"] == flat["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert flat["sample_from_anchor"] is flat["dflash_config"]["sample_from_anchor"] is True
    saved = read_config(exported(head, tmp_path / "two", target_folder, "speculators"))
    assert saved["aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert saved["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert saved["speculators_model_type"] == saved["speculators_config"]["algorithm"] == "dspark"
    assert len(LIMITED.ids) == saved["draft_vocab_size"]
    readme = (tmp_path / "one/export/vllm/README.md").read_text()
    assert '"method": "dspark"' in readme
    assert '"num_speculative_tokens": 4' in readme
    assert "--speculative-algorithm DSPARK" in readme
