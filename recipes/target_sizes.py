"""Where a target's config.json keeps the sizes of its decoder: model families name them in many ways."""

from typing import Any

# The sections in which multimodal models keep their decoder; Qwen's Omni models nest them.
TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config", "decoder")

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_dim", "emb_dim")
LAYERS = (
    "decoder_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "layers",
    "num_blocks",
)
LAYER_TYPES = ("layer_types", "layers_block_type")  # lists with an entry per layer; some families give no number beside
HEADS = (
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
)
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
HEAD_DIM = ("head_dim", "attention_head_dim", "attention_head_size", "kv_channels", "d_kv", "dim_head", "d_head")
INTERMEDIATE_SIZE = (
    "intermediate_size",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
    "dim_ff",
    "d_inner",
    "dff",
)
EXPERTS_IN_USE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "model_max_length",
    "max_target_positions",
    "context_length",
    "seq_length",
    "n_ctx",
)
VOCABULARY = ("vocab_size", "n_words")
NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "eps")
SOFT_CAP = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def text_section(config: dict[str, Any]) -> dict[str, Any]:
    """The section of config.json that describes the decoder; config.json itself for models of text alone."""
    for name in TEXT_SECTIONS:
        if isinstance(section := config.get(name), dict) and section:
            return text_section(section)
    return config


def first(sizes: dict[str, Any], *names: str) -> Any:
    """The first of these keys that is given."""
    return next((sizes[name] for name in names if sizes.get(name) is not None), None)
