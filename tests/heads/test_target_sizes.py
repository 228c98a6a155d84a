"""Laws of TargetConfig: every family's config.json gives its sizes, and a new head gets layers that it can have."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow_unless
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from headstart.heads.target_config import UNLIMITED, Rope, TargetConfig, mask_token

ALWAYS = {"bloom", "falcon", "gemma4", "gpt_neo", "mpt", "nemotron_h", "qwen3_5_moe", "qwen3_omni_moe", "xglm", "xlnet"}
FAMILIES = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
# Models of bytes in patches and of robots, and a drafter whose default configuration transformers refuses.
WITHOUT = {"blt", "pi0", "gemma4_assistant"}
SAME = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "vocab_size": "vocab_size"}
SAME |= {"max_positions": "max_position_embeddings"}
OF_LAYERS = (("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads"), ("head_dim", "head_dim"))


def written(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("family", slow_unless(ALWAYS, sorted(FAMILIES - WITHOUT | ALWAYS)))
def test_the_default_configuration_of_every_family_gives_its_sizes(family: str) -> None:
    whole = CONFIG_MAPPING[family]()
    found, text = TargetConfig.from_dict(written(whole)), written(whole.get_text_config(decoder=True))
    plain = "kv_lora_rank" not in text
    for ours, theirs in (*SAME.items(), *(OF_LAYERS if plain else ())):
        assert text.get(theirs) in (None, getattr(found, ours)), theirs
    sizes = (found.hidden_size, found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim)
    assert all(type(size) is int and size > 0 for size in (*sizes, found.intermediate_size, found.max_positions))


SEQ2SEQ = {"d_model": 8, "encoder_layers": 9, "decoder_layers": 3, "encoder_attention_heads": 4}
SEQ2SEQ |= {"decoder_attention_heads": 2, "vocab_size": 5, "max_position_embeddings": 7}


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "minicpm3", "mamba", "rwkv"])
def test_a_head_of_a_target_without_plain_attention_gets_plain_sizes(family: str) -> None:
    found = TargetConfig.from_dict(written(CONFIG_MAPPING[family]()))
    assert (found.num_heads, found.head_dim) == (found.hidden_size // 128, 128)
    assert found.num_kv_heads == math.gcd(found.num_heads, 8)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"n_embd": 8, "n_head": 2, "n_layer": 3, "vocab_size": 5}, (8, 2, 3, UNLIMITED)),
        ({"d_model": 8, "n_heads": 2, "n_layers": 3, "vocab_size": 5, "max_seq_len": 7}, (8, 2, 3, 7)),
        (SEQ2SEQ, (8, 2, 3, 7)),
    ],
    ids=["no limit of positions", "mpt", "a decoder beside an encoder"],
)
@pytest.mark.parametrize("section", [(), ("text_config",), ("llm_config",), ("thinker_config", "text_config")], ids=str)
def test_sizes_are_found_under_other_names(config, wanted, section):
    for name in reversed(section):
        config = {"model_type": "wrapper", "hidden_size": 99, name: config}
    found = TargetConfig.from_dict(config)
    assert (found.hidden_size, found.num_heads, found.num_layers, found.max_positions) == wanted


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, Rope(1e6)),
        ({"sliding_attention": {"rope_theta": 2e4}}, Rope(2e4)),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3]}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_type": "longrope", "short_factor": [1.0]}, Rope(5e5)),
        (
            {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "truncate": False},
            Rope(5e5, "yarn", {"factor": 4.0, "truncate": False}),
        ),
    ],
    ids=["of full attention", "sliding alone", "partial", "longrope", "yarn"],
)
def test_a_new_head_turns_as_engines_can(parameters: dict[str, Any], wanted: Rope) -> None:
    assert Rope.of_layers_for({"rope_parameters": parameters}) == wanted


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "phimoe", "granitemoe", "mixtral", "qwen3_moe"])
def test_a_head_was_as_narrow_as_one_expert_of_its_target(family: str) -> None:
    config = written(CONFIG_MAPPING[family]()) | ({"intermediate_size": 16} if family == "granitemoe" else {})
    found = TargetConfig.from_dict(config)
    assert 2 <= found.intermediate_size / found.hidden_size <= 4


def test_the_default_mask_token_was_one_that_the_target_writes(tmp_path: Path) -> None:
    """A row without a token, or a reserved token, if there is one; never a token that the head drafts."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes))

    def chosen(words: int, added: dict[int, str], drafted: list[int]) -> int:
        tokens = [{"id": id_, "content": content} for id_, content in added.items()]
        tokenizer = {"model": {"vocab": {str(word): word for word in range(words)}}, "added_tokens": tokens}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return mask_token(None, TargetConfig.from_folder(tmp_path), torch.tensor(drafted))

    assert chosen(8, {}, [0, 1]) == 9
    assert chosen(10, {3: "<|reserved_special_token_5|>", 9: "<|im_end|>"}, [*range(10)]) == 3
    assert chosen(10, {3: "<unused5>"}, [3, 9]) == 8
    assert chosen(10, {}, [0, 1]) == 9
