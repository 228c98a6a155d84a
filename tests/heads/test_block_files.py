"""Laws of block heads' files: published ones are converted or refused by name, lint knows the traps of every engine."""

from collections.abc import Callable
from typing import Any

import pytest
from bad_inputs import assert_message
from exported import EVERY_HEAD, LIMITED, edit_config, files_in_memory, read_config, same_bits

from headstart.heads.formats.lint import violations
from headstart.heads.formats.published import import_head
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.checkpoint import load_head_for, save_head

Config = dict[str, Any]
Edit = Callable[[Config], object]


def top(**values: Any) -> Edit:
    return lambda config: config.update(values)


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
def test_published_heads_keep_the_convention_of_their_authors(make_head, frozen, kind, edit, said):
    head = make_head(**EVERY_HEAD[kind])
    files = files_in_memory(head, "vllm")
    edit(files.config)
    files.tensors.update({"embed_tokens.weight": frozen.embedding, "lm_head.weight": frozen.lm_head})
    back, inferred = import_head(files, frozen)
    assert any(line.startswith(said) for line in inferred)
    assert {"embed_tokens.weight: a copy of the target's, left out"} < set(inferred)
    assert back.shape == head.shape
    assert same_bits(back.engine_tensors(), head.engine_tensors())


@pytest.mark.parametrize(
    ("layout", "edit", "part"),
    [
        ("vllm", drop("target_layer_ids"), "target_layer_ids: missing; vLLM takes"),
        ("vllm", drop("mask_token_id"), "mask_token_id"),
        ("vllm", top(num_target_layers=36), "num_target_layers: 36 found; the target's 7"),
        ("vllm", top(markov_head_type="rnn"), "markov_head_type 'rnn'"),
        ("vllm", nested(projector_type="domino"), "projector_type 'domino'"),
        ("speculators", drop("sample_from_anchor"), "sample_from_anchor: missing; vLLM takes false, speculators true"),
        ("speculators", top(speculators_model_type="dflash2"), "speculators_model_type 'dflash2': only 'dflash' and"),
        ("vllm", top(selector_rank=256), "selector_rank 256: only 0 is allowed"),
        ("vllm", nested(conv_kernel_size=2), "conv_kernel_size 2: only 0 is allowed"),
        ("vllm", nested(final_logit_softcapping=30.0), "final_logit_softcapping 30.0: only None is allowed"),
        ("vllm", top(output_multiplier=0.5), "output_multiplier 0.5: only 1 is allowed"),
    ],
)
def test_what_a_block_head_of_ours_cannot_do_is_refused_by_name(make_head, frozen, layout, edit, part):
    files = files_in_memory(make_head(**EVERY_HEAD["dspark"]), layout)
    del files.config["headstart"]
    edit(files.config)
    with pytest.raises(ValueError, match=part):
        import_head(files, frozen)


def test_a_head_that_asks_for_another_computation_is_not_loaded(make_head, frozen, tmp_path):
    save_head(make_head(**EVERY_HEAD["dflash"]), tmp_path / "head")
    edit_config(tmp_path / "head", top(selector_rank=256, output_multiplier=0.5))
    with pytest.raises(ValueError, match=r"selector_rank 256: only 0 is allowed; output_multiplier 0\.5: only 1"):
        load_head_for(tmp_path / "head", frozen)


def forget_causality(config: Config) -> None:
    """As speculators writes a head whose layers have no window."""
    del config["transformer_layer_config"]["is_causal"]
    config["sliding_window_non_causal"] = False


CAUSAL = "causal within the block, unlike in training"
WHOLE, WINDOW = Reach(), Reach(window=3)
CAUSAL_WHOLE, CAUSAL_WINDOW = Reach(causal=True), Reach(window=3, causal=True)


@pytest.mark.parametrize(
    ("reaches", "name", "edit", "engines"),
    [
        ((WHOLE, WHOLE), "vllm", dict, set()),
        ((WINDOW, WINDOW), "vllm", dict, set()),
        ((WHOLE, WINDOW), "vllm", dict, set()),
        ((CAUSAL_WINDOW, WHOLE), "vllm", dict, set()),
        ((CAUSAL_WHOLE, CAUSAL_WINDOW), "vllm", dict, set()),
        ((WHOLE, WHOLE), "speculators", dict, set()),
        ((WINDOW, WINDOW), "speculators", dict, set()),
        ((CAUSAL_WINDOW, CAUSAL_WINDOW), "speculators", dict, set()),
        ((CAUSAL_WINDOW, WHOLE), "speculators", dict, {"vllm"}),
        ((WHOLE, WHOLE), "speculators", forget_causality, {"vllm"}),
        ((WINDOW, WINDOW), "vllm", top(is_causal=True), {"vllm", "sglang"}),
        ((WINDOW, WINDOW), "vllm", drop("is_causal"), {"sglang"}),  # which does not read dflash_config.causal
        ((WINDOW, WINDOW), "vllm", drop("is_causal", "causal"), {"vllm", "sglang"}),
        ((CAUSAL_WHOLE,), "vllm", top(is_causal=None), {"sglang"}),
    ],
)
def test_every_engine_makes_the_layers_causal_that_were_trained_so(make_head, frozen, reaches, name, edit, engines):
    """`is_causal` rules all layers in vLLM and SGLang; `sliding_window_non_causal` too where vLLM reads speculators'
    layout."""
    files = files_in_memory(make_head("block", sample_from_anchor=False, reaches=reaches), name)
    assert import_head(files, frozen)[0].shape.reaches == reaches
    edit(files.config)
    found = violations(files, frozen, ["vllm", "speculators" if name == "speculators" else "sglang"])
    assert {each.engine for each in found if CAUSAL in each.text} == engines, list(map(str, found))


def test_an_export_names_taps_slots_and_mask_in_each_engines_own_counting(make_head, export_as):
    head = make_head(**EVERY_HEAD["dspark limited"])
    flat = read_config(folder := export_as(head, "vllm"))
    assert flat["target_layer_ids"] == flat["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    assert flat["sample_from_anchor"] is flat["dflash_config"]["sample_from_anchor"] is True
    saved = read_config(export_as(head, "speculators", "two"))
    assert saved["aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert saved["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert saved["speculators_model_type"] == saved["speculators_config"]["algorithm"] == "dspark"
    assert len(LIMITED.ids) == saved["draft_vocab_size"]
    said = '"method": "dspark" | "num_speculative_tokens": 4 | --speculative-algorithm DSPARK'
    assert_message((folder / "README.md").read_text(), said)
