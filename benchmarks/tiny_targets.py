"""A tiny random model of every type that transformers registers as a causal or an image-text-to-text model.

`make_target(name)` shrinks the type's default configuration by the names of its fields; what needs more stands in
SPECIAL. Layers of every kind that a family has occur in its tiny model.
"""

import dataclasses
import re
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headstart.inference.targets.architecture import attention_code

TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
VOCAB = 128
FIRST_WORD, WORDS = 3, 96  # the tokens of text; tokens of images and sounds follow
LAYERS = 4  # and more where a family has more kinds of layers
WINDOW = 16

# The first pattern that matches a field's whole name gives its value in a tiny model; no field grows.
SIZES: list[tuple[str, Any]] = [
    # Rounding must not grow from layer to layer, but the text must not be constant either.
    (r"initializer_range|init_std|embed_init_std|.*initializer_factor", 0.25),
    (r"depth", 2),
    (r"(num_|n_)?(hidden_|en|de|coder_)*layers?|num_blocks|num_layers_per_stack", LAYERS),
    (r"index_topk", WINDOW),
    (r".*(key_value|kv|key)_heads|kv_n_heads", 2),
    (r"index_n_heads", 32),  # scores of few index heads tie at 0, for which no order is certain
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r".*heads|n_head", 4),
    (r".*rope_head_dim", 8),
    (r".*(head_dim|headdim|d_head|dim_head|head_size)|kv_channels|d_kv|d_rel", 16),
    (r".*rank", 24),
    (r".*(shared_experts?|groups?)", 2),
    (r".*_experts", 8),
    (r".*(experts_per_tok(en)?|top_?k|moe_k|topk_blocks)", 2),
    (r".*(intermediate|ffn|ff|mlp|feed_forward)_(hidden_)?(size|dim).*|n_inner|d_?ff|d_inner|.*expert_dim|dim_ff", 48),
    (r".*hidden_size.*|d_model|n_embd|.*emb(ed)?(ding)?_(dim|size)|.*proj(ection)?_dim|lru_width", 64),
    (r".*(in|out|output)_dim|adapter_input_size", 64),
    (r".*vocab_size.*|encoder_hash_byte_group_vocab", VOCAB),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_(source|target)_positions|model_max_length", 256),
    (r".*(sliding_window|window_size|window_len).*|local_attention|log_scaling_n_floor", WINDOW),
    (r".*chunk_size|block_size", WINDOW),
    (r"index_block_size", 4),
    (r".*(d_state|state_size)", 8),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"(max_)?image_size", 16),
    (r"patch_size", 4),
    (r"(base|latent|output)_channels", 32),
    (r"num_position_embeddings|position_embedding_size|latent_query_num", 64),
]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FEW = {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
MIXED = {"layer_types": [SLIDING, FULL] * 2}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}
UNEVEN = ROPE | {"mrope_section": [3, 3, 2]}
TEXT_ENDS = ("bos_token_id", "pad_token_id", "eos_token_id")

# What the names do not say, by type.
SPECIAL: dict[str, dict[str, Any]] = {
    "blenderbot": {"encoder_layers": LAYERS},
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 127, "IMGIMGAZ": 126}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": MIXED | {"rope_parameters": {SLIDING: UNEVEN, FULL: UNEVEN}},
    "mllama_text_model": {"cross_attention_layers": [1]},  # the last layer has none in a real one either
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 4.0}},
    "deepseek_v2": FEW,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2},
    "deepseek_v4": {
        "layer_types": [SLIDING, "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_hidden_layers": 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
    },
    # Of more tokens than this, Doge keeps those with the largest scores, which tie exactly where a token repeats.
    "doge": {"keep_window_size": 256},
    "dots1": MIXED | FEW | {"n_routed_experts": 8, "n_shared_experts": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 24], "rope_parameters": UNEVEN},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "gemma3n_text": MIXED | {"num_kv_shared_layers": 2},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma4_text": MIXED | {"num_kv_shared_layers": 2, "global_head_dim": 32},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "glm4v_text": MROPE,
    "glm5_next_text": {"index_kpool": 4},
    "glm_ocr_text": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 1]],
        "spatial_target_layers": [2],
        "image_grid_pinpoints": [[16, 32]],
    },
    "granitemoehybrid": {"layer_types": [LINEAR, FULL] * 2},
    "hrm_text": {"num_layers_per_stack": ..., "num_hidden_layers": 1},
    "hunyuan_vl_text": MROPE,
    "inkling_vision": {"num_hidden_layers": LAYERS},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 24, "zero_expert_num": 4},
    "mamba2": {"num_heads": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [16, 16], "num_position_embeddings": 16},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    # transformers reads a prompt without Moshi's window, but cuts the cache to it.
    "moshi": {"sliding_window": 256},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 100},
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 100},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "ple_layer_ids": [2],
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 97,
        "split_ngram_parts": 1,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "step3p5": MIXED | {"rope_parameters": {SLIDING: ROPE, FULL: ROPE}, "sliding_window": WINDOW},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
}


def make_target(name: str, seed: int = 0, sees: bool = False) -> PreTrainedModel:
    """A random float32 model; its norms, biases and sinks, which start as constants, are random too.

    `sees`: with the image tower, where the causal model is without it.
    """
    config = tiny_config(name)
    is_text = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not sees
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, attn_implementation=attention_code(config))
        with torch.no_grad():
            for field, parameter in model.named_parameters():
                if parameter.ndim == 1 or not parameter.any():  # large biases would outweigh the text
                    parameter.add_((0.06 if "bias" in field else 0.3) * torch.randn_like(parameter))
    if model.can_generate():
        model.generation_config.eos_token_id = VOCAB  # never written, so texts end by their length
        model.generation_config.forced_eos_token_id = None
    return model.float().eval().requires_grad_(False)


def tiny_config(name: str) -> PreTrainedConfig:
    config = AutoConfig.for_model(name)
    tiny: PreTrainedConfig = type(config)(**shrunk(config))
    return tiny


def merged(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """`fields` with `others`, section by section; a field that is ... is left out."""
    both = dict(fields)
    for name, value in others.items():
        both[name] = merged(both.get(name, {}), value) if isinstance(value, dict) else value
    return {name: value for name, value in both.items() if value is not ...}


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a default configuration that must change."""
    names = {field.name: config.attribute_map.get(field.name, field.name) for field in dataclasses.fields(config)}
    fields = {name: vars(config)[own] for name, own in names.items() if own in vars(config)}  # not what it derives
    count = next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), None)
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count}
    lists = {name: value for name, value in lists.items() if value != [*range(len(value))]}
    kept = chosen_layers(lists) if lists else [*range(min(LAYERS if "vocab_size" in fields else 2, count or 0))]
    new: dict[str, Any] = {}
    special_token = iter(range(VOCAB - 1, WORDS, -1))
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            new[name] = {"model_type": value.model_type, **shrunk(value)}
        elif name in lists:
            new[name] = [smaller(name, value[place]) for place in kept]
        elif name in TEXT_ENDS:
            new[name] = TEXT_ENDS.index(name) if isinstance(value, list) or (value or 0) >= FIRST_WORD else value
        elif name == "head_dim" and value is None and "kv_lora_rank" not in fields:
            new[name] = 16
        elif re.fullmatch(r".*_token_(id|index)|.*_patch_id|im_\w+_id", name) and isinstance(value, int):
            new[name] = next(special_token)
        elif name == "deepstack_visual_indexes":
            new[name] = [0, 1]
        elif name == "tie_word_embeddings":
            new[name] = False
        elif name == "is_decoder":
            new[name] = True
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            new[name] = value | {"mrope_section": MROPE["rope_parameters"]["mrope_section"]}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            new[name] = smaller(name, value)
    if count:
        name = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields)
        new[name] = len(kept)
    if "kv_lora_rank" in new or fields.get("num_key_value_heads") is None:
        new.pop("num_key_value_heads", None)
        if "num_key_value_heads" in fields:
            new["num_key_value_heads"] = new.get("num_attention_heads")
    return merged(new, SPECIAL.get(config.model_type, {}))


def chosen_layers(lists: dict[str, list[Any]]) -> list[int]:
    """Places of layers: each combination of their kinds once, then each for the second time while there is room."""
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)]
    turns = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    order = sorted(range(len(kinds)), key=lambda place: (turns[place], place))
    return sorted(order[: max(LAYERS, len(set(kinds)))])


def smaller(name: str, value: Any) -> Any:
    """The value of a field in a tiny model."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    if size is None:
        return value
    return size if isinstance(size, float) else min(value, size)
