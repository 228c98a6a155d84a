"""A tiny random model, about 30,000 weights, of each model family that a target may have: FAMILIES[name](seed=0)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.inference.targets.architecture import attention_code

WINDOW = 16  # tokens that a token in a sliding layer sees, itself included
SLIDING, FULL = "sliding_attention", "full_attention"

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.6, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
# With tied and scaled embeddings, a random model only repeats its last token.
UNTIED = {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALTERNATING: dict[str, Any] = {**GROUPED, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
LAST_SLIDING = {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

CAPPED = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 64, "truncate": False}
MULTIPLIED = {"embedding_multiplier": 2, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 0.5}

# Name -> model type and config. Soft caps, scales and multipliers are set where their defaults would have no visible
# effect at these sizes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen2_mixed": ("qwen2", LAST_SLIDING),
    "qwen3": ("qwen3", GROUPED),
    "qwen3_mixed": ("qwen3", LAST_SLIDING),
    "qwen3_moe": ("qwen3_moe", {**GROUPED, **EXPERTS, "norm_topk_prob": True}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**GROUPED, **FEW_EXPERTS}),
    "gemma2": ("gemma2", {**ALTERNATING, **UNTIED, **CAPPED}),
    "gemma3": ("gemma3_text", {**ALTERNATING, **UNTIED, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", GROUPED),
    "phi3_sliding": ("phi3", {**GROUPED, "sliding_window": WINDOW}),
    "gpt2": ("gpt2", SIZES),  # learned positions
    "gpt_neox": ("gpt_neox", {**SIZES, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", ALTERNATING),
    "gpt_oss": ("gpt_oss", {**ALTERNATING, **FEW_EXPERTS, "rope_parameters": YARN}),  # attention sinks
    "granite": ("granite", {**GROUPED, **MULTIPLIED}),
    "cohere2": ("cohere2", {**ALTERNATING, **UNTIED, "logit_scale": 1.0}),  # no rotary embedding in the full layers
    "starcoder2": ("starcoder2", {**GROUPED, "sliding_window": WINDOW}),
    "glm4": ("glm4", GROUPED),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layers": [1, 0]}),
    "exaone4": ("exaone4", ALTERNATING),
}

# Families whose states cannot be cut back, and others with a layer of their own: they are tested apart.
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SCANNED = {
    "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", FULL],
}  # fmt: skip
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**GROUPED, **EXPERTS, **SCANNED}),
    "falcon_h1": ("falcon_h1", {**GROUPED, **MAMBA, "mamba_d_ssm": 32}),  # each layer has attention and a state
    "lfm2": ("lfm2", {**GROUPED, "layer_types": ["conv", FULL]}),
}
# Its passes over several tokens do not go on from its states.
JAMBA: dict[str, Any] = {
    **GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
}  # fmt: skip
ROUTED = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CHUNKED = {
    "num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**SIZES, **LATENT, **ROUTED}),
    "llama4": ("llama4_text", {**GROUPED, **CHUNKED}),
}


def make_family(name: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random float32 model of a family; norms, biases and sinks are random too. `config` overrides its config."""
    model_type, sizes = {**CONFIGS, **STATEFUL, **OTHERS, "jamba": ("jamba", JAMBA)}[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = AutoConfig.for_model(model_type, **{**sizes, **config})
        settings.eos_token_id = None  # GLM-4's config replaces None with its own default
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention_code(settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms, biases and sinks start as constants, which would hide mistakes
                    parameter += 0.3 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


class Int8Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale: Tensor
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127  # [out, 1]
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(features, self.weight.to(features.dtype) * self.scale, self.bias)


def make_int8(seed: int = 0, **config: Any) -> PreTrainedModel:
    """The llama model with int8 weights in its layers; embedding and output layer stay in floating point."""
    model = make_family("llama", seed, **config)
    for module in [*model.get_decoder().layers.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {name: partial(make_family, name) for name in CONFIGS}
FAMILIES["int8"] = make_int8
# Eager attention with soft caps, sliding windows; sinks, experts; learned positions; packed weights.
SOME_FAMILIES = ("gemma2", "gpt_oss", "gpt2", "int8")
