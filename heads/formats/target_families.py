"""Which engines refuse EAGLE-3 heads for which families of targets, as their own sources say.

Read on 26 November 2026. An EAGLE-3 head needs hidden states from inside the target: vLLM 0.33.0 refuses to start where
its own class of the target lacks the SupportsEagle3 interface (families without such a class run by transformers,
which has it), and SGLang 0.5.23 where the class lacks set_eagle3_layers_to_capture. Nothing is said about families that
are not listed; TensorRT-LLM was not read. The names are model_type of the decoder in config.json.
"""

from collections.abc import Iterator

from headstart.heads.formats.subject import Subject, Violation

# fmt: off
NEITHER = (
    "axk1", "cohere", "cohere2", "ernie4_5_moe", "ernie4_5_vl_moe_text", "falcon", "falcon_h1", "gemma", "gemma2",
    "gemma3n_text", "glm4", "glm4v_moe_text", "glm4v_text", "granitemoehybrid", "hy_v3", "hy_v4", "hyperclovax",
    "jamba", "lfm2", "lfm2_moe", "mixtral", "nemotron", "olmo_hybrid", "olmoe", "qwen2_vl_text",
)
ONLY_SGLANG = (
    "exaone_moe", "gemma3_text", "glm4_moe", "glm4_moe_lite", "longcat_flash", "qwen2_moe",
)
ONLY_VLLM = (
    "afmoe", "arcee", "cohere2_moe", "deepseek_v4", "ernie4_5", "exaone4", "glm", "granite", "granite_swa",
    "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_linear",
    "laguna", "mimo_v2_flash", "minicpm3", "nemotron_h", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3",
    "starcoder2",
)
# fmt: on
REFUSED = {
    "vllm": ("vLLM 0.33.0", frozenset([*NEITHER, *ONLY_SGLANG])),
    "sglang": ("SGLang 0.5.23", frozenset([*NEITHER, *ONLY_VLLM])),
}


def gives_hidden_states(subject: Subject, engine: str) -> Iterator[Violation]:
    family = subject.frozen.config.model_type
    if engine in REFUSED and family in REFUSED[engine][1]:
        allowed = f"another engine is allowed: {REFUSED[engine][0]} starts no EAGLE-3 head for this family of targets"
        yield Violation(engine, "error", "the target's model_type", family, allowed)
