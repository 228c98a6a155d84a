"""Laws of a GGUF file's settings: what llama.cpp reads arrives in the model and tokenizer, or the file is refused."""

from pathlib import Path
from typing import Any

import families
import numpy
import pytest
import torch
from gguf_files import write_gguf
from test_gguf import needs_reader
from tiny_run import build_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.gguf import unpack
from headstart.inference.targets.gguf_settings import LAYERS_OF_27B
from headstart.inference.targets.tokenizer import load_tokenizer

SIZES: dict[str, Any] = {
    **families.SIZES,
    "vocab_size": build_tokenizer().vocab_size,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = [1.0, 1.5, 2.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "long_factor": LONG,
    "short_factor": LONG,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.25,
}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
SCALED_27B = {"num_hidden_layers": 7, "head_dim": 4, "query_pre_attn_scalar": 8, "sliding_window": 6}


def llama3_divisors() -> numpy.ndarray[Any, Any]:
    """The tensor rope_freqs.weight of a Llama 3.1 with heads of 32: the formula of llama.cpp's converter."""
    wavelengths = 2 * numpy.pi * 500000.0 ** (numpy.arange(0, 32, 2) / 32)
    smooth = numpy.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 8 + smooth)).astype(numpy.float32)


# Each family with settings unlike its defaults: the configuration, the architecture, the keys, and more tensors.
FAMILIES: dict[str, tuple[PreTrainedConfig, str, dict[str, Any], dict[str, Any]]] = {
    "llama with rope_freqs": (
        LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3),
        "llama",
        {".rope.dimension_count": 32, ".rope.freq_base": 500000.0},
        {"rope_freqs.weight": llama3_divisors()},
    ),
    "llama with biases and linear positions": (
        LlamaConfig(**SIZES, attention_bias=True, rope_parameters={**LOCAL, "rope_type": "linear", "factor": 2.0}),
        "llama",
        {".rope.scale_linear": 2.0},
        {},
    ),
    "qwen2 with yarn": (
        Qwen2Config(**SIZES, rope_parameters=YARN),
        "qwen2",
        {
            ".rope.freq_base": 1e6,
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 64,
        },
        {},
    ),
    "qwen3 with another head size": (
        Qwen3Config(**SIZES, head_dim=16),
        "qwen3",
        {".attention.key_length": 16, ".attention.value_length": 16},
        {},
    ),
    "qwen3moe with another expert width": (
        Qwen3MoeConfig.from_dict(
            {
                **SIZES,
                "head_dim": 16,
                "moe_intermediate_size": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            }
        ),
        "qwen3moe",
        {
            ".attention.key_length": 16,
            ".expert_count": 4,
            ".expert_used_count": 2,
            ".expert_feed_forward_length": 24,
        },
        {},
    ),
    "gemma2 with other caps": (
        Gemma2Config(
            **SIZES,
            head_dim=8,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            sliding_window=6,
        ),
        "gemma2",
        {
            ".attention.key_length": 8,
            ".attn_logit_softcapping": 2.0,
            ".final_logit_softcapping": 3.0,
            ".attention.sliding_window": 6,
        },
        {},
    ),
    "gemma3 of 27B with scaled positions": (
        Gemma3TextConfig(
            **{**SIZES, **SCALED_27B}, rope_parameters={"full_attention": GLOBAL, "sliding_attention": LOCAL}
        ),
        "gemma3",
        {
            ".attention.key_length": 4,
            ".rope.freq_base": 1e6,
            ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 8.0,
            ".attention.sliding_window": 6,
        },
        {},
    ),
    "phi3 with longrope": (
        Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=128),
        "phi3",
        {
            ".rope.dimension_count": 6,
            ".rope.scaling.type": "longrope",
            ".rope.scaling.attn_factor": 1.25,
            ".rope.scaling.original_context_length": 128,
        },
        {f"rope_factors_{kind}.weight": numpy.array(LONG, dtype=numpy.float32) for kind in ("long", "short")},
    ),
    "starcoder2 with another base": (
        Starcoder2Config(**SIZES, rope_parameters={**LOCAL, "rope_theta": 999999.0}),
        "starcoder2",
        {".rope.freq_base": 999999.0},
        {},
    ),
    "stablelm with half of a head rotated": (
        StableLmConfig(**SIZES, rope_parameters={**LOCAL, "partial_rotary_factor": 0.5}),
        "stablelm",
        {".rope.dimension_count": 4, ".use_parallel_residual": False},
        {},
    ),
}


def tiny(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data = (torch.randn(weight.shape) * 0.3).bfloat16().float()
    return model


def write(tmp_path: Path, name: str, **more: Any) -> Path:
    config, architecture, keys, tensors = FAMILIES[name]
    keys, tensors = {**keys, **more.get("keys", {})}, {**tensors, **more.get("tensors", {})}
    return write_gguf(tiny(config), tmp_path / "tiny.gguf", architecture, keys=keys, tensors=tensors)


@needs_reader
@pytest.mark.parametrize("name", FAMILIES)
def test_a_setting_of_the_file_was_dropped_and_the_model_computed_something_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYERS_OF_27B, "gemma3", SCALED_27B["num_hidden_layers"])
    unpack(write(tmp_path, name), tmp_path / "folder")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    wanted = tiny(FAMILIES[name][0])
    tokens = torch.arange(40).view(1, 40) + 60
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, wanted(tokens).logits, rtol=1e-3, atol=1e-3)


@needs_reader
@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({".attention.scale": 0.5}, {}, r"llama\.attention\.scale is 0\.5, which a configuration"),
        ({".expert_count": 4}, {}, r"llama\.expert_count is 4"),
        ({".rope.scaling.yarn_ext_factor": 0.5}, {}, r"llama\.rope\.scaling\.yarn_ext_factor is 0\.5"),
        ({".attention.sliding_window": 64}, {}, r"llama\.attention\.sliding_window is 64"),
        ({"split.count": 3}, {}, r"split\.count is 3: this is one part of a model; merge all parts"),
        ({"general.type": "adapter"}, {}, r"general\.type is 'adapter'"),
        ({"tokenizer.ggml.pre": "poro-chat"}, {}, r"tokenizer\.ggml\.pre is 'poro-chat', a way to split text"),
        ({"tokenizer.ggml.pre": None}, {}, r"tokenizer\.ggml\.pre is None"),
        ({}, {"rope_freqs.weight": numpy.full(4, 3.0, numpy.float32)}, r"rope_freqs\.weight holds divisors"),
        ({}, {"blk.0.attn_q_norm.weight": numpy.ones(8, numpy.float32)}, r"its tensors blk\.0\.attn_q_norm\.weight"),
        ({".block_count": 3}, {}, r"it has no tensors for model\.layers\.2\.input_layernorm\.weight, .* of a 'llama'"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_by_name(
    keys: dict[str, Any], tensors: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, "llama with biases and linear positions", keys=keys, tensors=tensors)
    with pytest.raises(ValueError, match=rf"tiny\.gguf: {said}"):
        unpack(path, tmp_path / "folder")


@needs_reader
def test_a_gemma_4_file_whose_windows_would_be_others_is_refused(tmp_path: Path) -> None:
    config = Gemma4TextConfig.from_dict(
        {**SIZES, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    )
    keys = {".attention.sliding_window": 16, ".attention.sliding_window_pattern": [True, False]}
    path = write_gguf(tiny(config), tmp_path / "tiny.gguf", "gemma4", keys=keys)
    with pytest.raises(ValueError, match=r"gemma4\.attention\.sliding_window_pattern is \[True, False\], which a"):
        unpack(path, tmp_path / "folder")


@needs_reader
def test_a_files_named_chat_templates_were_dropped(tmp_path: Path) -> None:
    keys = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools[0].function.name }}",
    }
    unpack(write(tmp_path, "llama with rope_freqs", keys=keys), tmp_path / "folder")
    template = ChatTemplate(load_tokenizer(tmp_path / "folder"))
    turns = [{"role": "user", "content": "a"}]
    assert template.render(turns, [{"type": "function", "function": {"name": "f"}}]) == "f"
    assert template.render(turns) == "[user]a[assistant]"


@needs_reader
def test_end_tokens_sampling_and_the_start_token_of_a_file_arrive(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 7,
        "tokenizer.ggml.bos_token_id": 9,
        "tokenizer.ggml.pre": "llama-bpe",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 12,
    }
    unpack(write(tmp_path, "llama with rope_freqs", keys=keys), tmp_path / "folder")
    settings = GenerationConfig.from_pretrained(tmp_path / "folder")
    assert (settings.eos_token_id, settings.temperature, settings.top_k, settings.do_sample) == (
        [0, 5, 7],
        0.5,
        12,
        True,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("def")["input_ids"][0] == 9
    assert tokenizer.backend_tokenizer.model.ignore_merges
