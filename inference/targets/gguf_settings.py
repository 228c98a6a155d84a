"""The settings and tensors of a GGUF file that decide what its model computes.

transformers reads some of them and drops the others in silence. Each key and tensor that llama.cpp reads for a family
arrives in the configuration here, or the file is refused with its name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import decoders, normalizers, pre_tokenizers
from torch import nn
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from gguf import ReaderTensor

Metadata = Mapping[str, Any]


class LostSetting(ValueError):
    """Something in a GGUF file that transformers' configuration, model or tokenizer cannot hold."""


# Each key after the architecture, and the field that holds it: the first of these that a family has.
FIELDS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
}
ROPE_KEYS = {
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
    *(f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")),
}
UNUSED_KEYS = {"vocab_size", "tensor_data_layout"}  # the vocabulary's size is the embedding's
NEUTRAL = {  # values with which a key changes nothing
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "ssm.dt_b_c_rms": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
WHOLE_IN_TRANSFORMERS = ("qwen35", "qwen35moe", "lfm2")  # it builds their configurations from all their keys
ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}  # a field and its tensor
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled by another size than the head's
SAMPLING = {  # the checkpoint's own defaults, which become those of generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
LLAMA3_CONTEXTS = [2**power for power in range(10, 20)]  # before its positions were scaled
NAMED_MAX = 4  # in a message

# How llama.cpp splits text before the merges, by tokenizer.ggml.pre; transformers knows others, or splits like GPT-2.
SPLITS_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "jina-es", "jina-de", "jina-v2-code"}
SPLITS_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
BEGINS_WITH_BOS = {  # and looks for a whole word in the vocabulary before it merges
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "tekken",
}


def restore(
    config: PreTrainedConfig, metadata: Metadata, tensors: "Sequence[ReaderTensor]", architecture: str
) -> PreTrainedConfig:
    """The configuration with everything that the file says; LostSetting, naming the key, for what it cannot hold."""
    if int(metadata.get("split.count", 1)) > 1:
        raise LostSetting(
            f"split.count is {metadata['split.count']}: this is one part of a model; merge all parts with "
            "llama.cpp's llama-gguf-split"
        )
    if metadata.get("general.type", "model") != "model":
        raise LostSetting(f"general.type is {metadata['general.type']!r}, 'model' is allowed; merge it into its model")
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    names = {tensor.name for tensor in tensors}
    fresh = type(config)()
    if architecture not in WHOLE_IN_TRANSFORMERS:
        for key, value in own.items():
            set_field(config, prefix, key, value, own)
        for field, name in BIASES.items():
            if hasattr(fresh, field):
                setattr(config, field, name in names)
        if "new_decoder_architecture" in vars(fresh):  # of Falcon
            config.new_decoder_architecture = "blk.0.attn_norm_2.weight" in names
            config.multi_query = config.num_kv_heads == 1
        if architecture in LAYERS_OF_27B:
            is_27b = own["block_count"] == LAYERS_OF_27B[architecture]
            config.query_pre_attn_scalar = (
                own["embedding_length"] // own["attention.head_count"] if is_27b else config.head_dim
            )
        if architecture == "gemma3" and not own.get("attention.sliding_window"):
            raise LostSetting(f"{prefix}attention.sliding_window is missing; convert the model again")
        restore_rope(config, fresh, own, {each.name: each for each in tensors if each.name in ROPE_TENSORS}, prefix)
    embedding = next((each for each in tensors if each.name == "token_embd.weight"), None)
    if embedding is None:
        raise LostSetting("it has no tensor token_embd.weight")
    config.vocab_size = int(embedding.shape[-1])
    config.tie_word_embeddings = "output.weight" not in names
    token = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(token[name] for name in ("eos", "eot", "eom") if token[name] is not None))
    config.bos_token_id, config.pad_token_id = token["bos"], token["padding"]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    return config


def set_field(config: PreTrainedConfig, prefix: str, key: str, value: Any, own: Metadata) -> None:
    """Put the value of a key where its family has it, and refuse one that the configuration cannot hold."""
    if key in UNUSED_KEYS or key in ROPE_KEYS or value in NEUTRAL.get(key, ()):
        return
    field = next((field for field in FIELDS.get(key, ()) if hasattr(config, field)), None)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    implied = {
        "attention.key_length": own["embedding_length"] // max(own.get("attention.head_count", 1), 1),
        "feed_forward_length": 4 * own["embedding_length"],
    }
    implied["attention.value_length"] = own.get("attention.key_length", implied["attention.key_length"])
    if field is not None and not isinstance(value, list):
        setattr(config, field, value or None if key == "attention.sliding_window" else value)
    elif value != implied.get(key) and (key, value) != ("attention.head_count_kv", own.get("attention.head_count")):
        raise LostSetting(
            f"{prefix}{key} is {str(value)[:80]}, which a configuration of type {config.model_type!r} cannot hold, so "
            "the model would compute something else"
        )


def restore_rope(
    config: PreTrainedConfig,
    fresh: PreTrainedConfig,
    own: Metadata,
    tensors: "Mapping[str, ReaderTensor]",
    prefix: str,
) -> None:
    """Put the base, scaling and width of the rotary positions into the configuration, as llama.cpp reads them."""
    default = getattr(fresh, "rope_parameters", None)
    if default is None:
        if rotary := sorted(ROPE_KEYS & own.keys()) or sorted(tensors):
            raise LostSetting(f"{prefix}{rotary[0]}: a {config.model_type!r} model has no rotary positions")
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = own.get("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_theta": own.get("rope.freq_base", 10000.0), **scaling_of(own, config, prefix)}
    if "partial_rotary_factor" in default:
        rope["partial_rotary_factor"] = width / head_dim
    elif width != head_dim:
        raise LostSetting(f"{prefix}rope.dimension_count is {width}, {head_dim}, the size of a head, is allowed")
    if rope["rope_type"] == "longrope":
        for kind in ("long", "short"):
            if (factors := tensors.get(f"rope_factors_{kind}.weight")) is None:
                raise LostSetting(f"rope_factors_{kind}.weight is missing, which {prefix}rope.scaling.type needs")
            rope[f"{kind}_factor"] = factors.data.tolist()
    elif (factors := tensors.get("rope_freqs.weight")) is not None:
        rope |= llama3_scaling(torch.from_numpy(factors.data.copy()), rope, head_dim)
    if all(isinstance(each, dict) for each in default.values()):
        local = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10000.0)}
        config.rope_parameters = {"full_attention": rope, "sliding_attention": local}
    elif own.get("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise LostSetting(
            f"{prefix}rope.freq_base_swa is {own['rope.freq_base_swa']}, which the model has no field for"
        )
    else:
        config.rope_parameters = rope
    if rope["rope_type"] == "longrope" and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]


def scaling_of(own: Metadata, config: PreTrainedConfig, prefix: str) -> dict[str, Any]:
    """The scaling of positions in transformers' names."""
    scaling = {key.removeprefix("rope.scaling."): value for key, value in own.items() if "rope.scaling." in key}
    kind, factor = scaling.get("type", "linear"), scaling.get("factor") or own.get("rope.scale_linear") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = scaling.get("original_context_length", config.max_position_embeddings)
    if kind == "longrope":
        named = {"attention_factor": scaling["attn_factor"]} if "attn_factor" in scaling else {}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **named}
    if kind == "yarn":
        names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        betas = {names[key]: value for key, value in scaling.items() if key in names}
        attention = scaling.get("attn_factor", 1.0) * (0.1 * math.log(factor) + 1)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return {**yarn, **betas, "attention_factor": attention}
    raise LostSetting(f"{prefix}rope.scaling.type is {kind!r}; none, linear, yarn and longrope are allowed")


def llama3_scaling(divisors: torch.Tensor, rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The scaling whose frequencies are those of the base, divided by the numbers of the tensor rope_freqs.weight."""
    if bool((divisors == 1).all()):
        return {}
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
    factor, low, high = round(float(divisors.max()), 4), 1.0, 4.0
    for context in LLAMA3_CONTEXTS if len(divisors) == len(wavelengths) else ():
        smooth = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
        if torch.allclose(1 / divisors, (1 - smooth) / factor + smooth, rtol=1e-4):
            found = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": context}
    raise LostSetting("rope_freqs.weight holds divisors of frequencies that are not those of Llama 3's scaling")


def refuse_lost_tensors(
    model: nn.Module, config: PreTrainedConfig, tensors: "Sequence[ReaderTensor]", missing: Sequence[str], arch: str
) -> None:
    """Raise LostSetting, naming them, if tensors of the file did not get into the model, or it lacks some."""
    if missing:
        raise LostSetting(f"it has no tensors for {named(missing)} of a {config.model_type!r} model")
    layers = config.num_hidden_layers
    read = [each for each in tensors if each.name not in ROPE_TENSORS and not is_left_out(each.name, layers)]
    held = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    if sum(int(each.n_elements) for each in read) != sum(held.values()):
        lost = [each.name for each in read if each.name not in names_in_file(model, arch, layers)]
        raise LostSetting(f"its tensors {named(lost)} have no place in a {config.model_type!r} model")


def is_left_out(name: str, layers: int) -> bool:
    """Whether plain decoding does without a tensor: one of multi-token prediction, or of an old converter."""
    block = name.split(".")[1] if name.startswith("blk.") else "0"
    return "attn_rot_embd" in name or ".nextn." in name or int(block) >= layers


def names_in_file(model: nn.Module, arch: str, layers: int) -> set[str]:
    """llama.cpp's names of a model's tensors."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], layers)
    known = (names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict())
    return {name for name in known if name is not None}


def named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def sampling_of(metadata: Metadata) -> dict[str, Any]:
    """The sampling that the file recommends, in the names of generation_config.json."""
    keys = {f"general.sampling.{name}": field for name, field in SAMPLING.items()}
    found = {field: metadata[key] for key, field in keys.items() if key in metadata}
    return {"do_sample": True, **found} if found else {}


def restore_tokenizer(tokenizer: Any, metadata: Metadata) -> None:
    """Give a tokenizer what the file says and transformers drops; LostSetting for an unknown way to split text."""
    settings = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    backend = tokenizer.backend_tokenizer
    if settings["model"] == "gpt2":
        restore_splits(backend, settings.get("pre"))
    elif settings["model"] == "llama":
        adds_space = settings.get("add_space_prefix", True)
        if adds_space != tokenizer.tokenize("a")[0].startswith("\u2581"):
            spaces = normalizers.Replace(" ", "\u2581")
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if adds_space else spaces
            backend.pre_tokenizer = None
            first = [decoders.Strip(" ", 1, 0)] if adds_space else []
            parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
            backend.decoder = decoders.Sequence([*parts, *first])
    by_default = settings["model"] == "llama" or settings.get("pre") in BEGINS_WITH_BOS
    template = "tokenizer.chat_template."
    if named_templates := {key.removeprefix(template): metadata[key] for key in metadata if key.startswith(template)}:
        default = {} if tokenizer.chat_template is None else {"default": tokenizer.chat_template}
        tokenizer.chat_template = {**default, **named_templates}
    tokenizer.add_bos_token = settings.get("add_bos_token", by_default) and tokenizer.bos_token is not None
    tokenizer.add_eos_token = settings.get("add_eos_token", False)


def restore_splits(backend: Any, pre: str | None) -> None:
    """Split text before the merges as llama.cpp does, where transformers reads a tokenizer like GPT-2's."""
    backend.model.ignore_merges = pre in BEGINS_WITH_BOS
    splits = backend.pre_tokenizer
    if pre in SPLITS_DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif isinstance(splits, pre_tokenizers.ByteLevel) and splits.use_regex and pre not in SPLITS_LIKE_GPT2:
        raise LostSetting(
            f"tokenizer.ggml.pre is {pre!r}, a way to split text that is not known here, so prompts would get other "
            "tokens"
        )
