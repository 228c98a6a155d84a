"""Rules for config.json: each yields what keeps one engine from serving the head as it was trained."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from headstart.heads.formats.subject import Subject, Violation, config_error
from headstart.heads.kinds.checkpoint import target_misfits
from headstart.heads.kinds.eagle3 import TAPS
from headstart.heads.target_config import Rope
from headstart.recipes.other_commands import ENGINE_NAMES

MROPE = ("mrope_section", "mrope_interleaved")  # keys of rotary embeddings that turn by time, row and column
BY_INDEX = ("vllm", "speculators")  # vLLM 0.33.0 in its default runner; SGLang 0.5.23 does as the head's config says
MISSING_NORMS = {"llama_cpp": ("fc_norm", "norm_output")}  # keys of EAGLE-3.1's norms that an engine does not have
# Families (model_type of the decoder) for which an engine starts no EAGLE-3 head, which needs hidden states from inside
# the target. Read on 26 November 2026: vLLM 0.33.0 refuses where its own class of the target lacks SupportsEagle3
# (families without such a class run by transformers, which has it), SGLang 0.5.23 where the class lacks
# set_eagle3_layers_to_capture. Nothing is said about families that are not listed; TensorRT-LLM was not read.
NEITHER = """
    axk1 cohere cohere2 ernie4_5_moe ernie4_5_vl_moe_text falcon falcon_h1 gemma gemma2 gemma3n_text glm4
    glm4v_moe_text glm4v_text granitemoehybrid hy_v3 hy_v4 hyperclovax jamba lfm2 lfm2_moe mixtral nemotron
    olmo_hybrid olmoe qwen2_vl_text
"""
ONLY_SGLANG = "exaone_moe gemma3_text glm4_moe glm4_moe_lite longcat_flash qwen2_moe"
ONLY_VLLM = """
    afmoe arcee cohere2_moe deepseek_v4 ernie4_5 exaone4 glm granite granite_swa granitemoe granitemoe_swa
    granitemoeshared hunyuan_v1_dense hunyuan_v1_moe kimi_linear laguna mimo_v2_flash minicpm3 nemotron_h olmo olmo2
    olmo3 seed_oss smollm3 starcoder2
"""
REFUSED = {
    "vllm": ("vLLM 0.33.0", frozenset((NEITHER + ONLY_SGLANG).split())),
    "sglang": ("SGLang 0.5.23", frozenset((NEITHER + ONLY_VLLM).split())),
}


def architectures(subject: Subject, engine: str) -> Iterator[Violation]:
    allowed = subject.layout.architectures.get(engine)
    named = subject.files.config.get("architectures") or [None]
    if allowed is not None and not allowed & set(named):
        yield config_error(engine, "architectures", named, f"{' or '.join(sorted(filter(None, allowed)))} is allowed")


def layer_options(subject: Subject, engine: str) -> Iterator[Violation]:
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if subject.config.get(key, allowed) != allowed:
            yield config_error(engine, key, subject.config[key], f"only {allowed!r} is allowed")


def llama_layers(subject: Subject, engine: str) -> Iterator[Violation]:
    config = subject.config
    for key, allowed, when_absent in (
        ("model_type", "llama", None),
        ("num_hidden_layers", subject.layout.kind.max_layers or config.get("num_hidden_layers"), None),
        ("tie_word_embeddings", False, False),
    ):
        if config.get(key, when_absent) != allowed:
            yield config_error(engine, key, config.get(key), f"only {allowed!r} is allowed")
    if config.get("bias"):
        allowed = "remove it: engines read it as the bias of the attention and leave that bias uninitialised"
        yield config_error(engine, "bias", config["bias"], allowed)
    for key in subject.missing_sizes:
        yield config_error(engine, key, config.get(key), "give the head's own size")


def positions(subject: Subject, engine: str) -> Iterator[Violation]:
    value, needed = subject.config.get("max_position_embeddings"), subject.frozen.config.max_positions
    if value is None or value < needed:
        allowed = f"the target's {needed} or more is allowed; drafts beyond this position are garbage"
        yield config_error(engine, "max_position_embeddings", value, allowed)


def fits_the_target(subject: Subject, engine: str) -> Iterator[Violation]:
    """The target's sizes in config.json, and our own note about the target that the head was trained for."""
    for key, value, its in target_misfits(subject.config, subject.frozen.config):
        if value is not None:
            allowed = f"the target's {its} is allowed: the head was trained for another target, name that one"
            yield config_error(engine, key, value, allowed)
    if (kind := subject.note.get("kind", subject.kind)) != subject.kind:
        yield config_error(engine, "headstart.kind", kind, f"{subject.kind!r} is allowed, the kind of the tensors")


def rope(subject: Subject, engine: str) -> Iterator[Violation]:
    """Older engines read rope_theta and rope_scaling, newer ones rope_parameters; both must match the training."""
    config, target = subject.config, subject.frozen.config
    newer = Rope.from_config(config)
    if config.get("rope_parameters") and "rope_theta" in config:
        older = Rope.from_config({key: config.get(key) for key in ("rope_theta", "rope_scaling")})
        if older != newer:
            allowed = f"rope_parameters says {asdict(newer)}; make rope_theta and rope_scaling agree with it"
            yield config_error(engine, "rope_theta", asdict(older), allowed)
    plain = {key: value for key, value in newer.scaling.items() if key not in MROPE}
    section = newer.scaling.get("mrope_section")
    newer = replace(newer, kind="default" if newer.kind == "mrope" else newer.kind, scaling=plain)
    if section is not None and (subject.note or engine in BY_INDEX):
        by = f"{ENGINE_NAMES[engine]} counts" if engine in BY_INDEX else "headstart trains with"
        allowed = f"leave it out: {by} one position a token, its index, after images too, where drafts would be worse"
        yield Violation(engine, "warning", "config.json mrope_section", section, allowed)
    if newer != target.rope and "target_rope" not in subject.note:
        severity = "error" if subject.note else "warning"
        allowed = f"the target's {asdict(target.rope)} is allowed, unless the head was trained with other values"
        yield Violation(engine, severity, "config.json rope_theta", asdict(newer), allowed)


def draft_vocabulary(subject: Subject, engine: str) -> Iterator[Violation]:
    size, vocab_size = subject.config.get("draft_vocab_size"), subject.frozen.config.vocab_size
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        allowed = f"1 to {vocab_size} is allowed: the number of tokens that the head drafts, even if it drafts all"
        yield config_error(engine, "draft_vocab_size", size, allowed)


def gives_hidden_states(subject: Subject, engine: str) -> Iterator[Violation]:
    family = subject.frozen.config.model_type
    if engine in REFUSED and family in REFUSED[engine][1]:
        allowed = f"another engine is allowed: {REFUSED[engine][0]} starts no EAGLE-3 head for this family of targets"
        yield Violation(engine, "error", "the target's model_type", family, allowed)


def refusing(family: str) -> list[str]:
    """The engines, with their versions, that refuse EAGLE-3 heads for this family."""
    return [label for label, families in REFUSED.values() if family in families]


def norms(subject: Subject, engine: str) -> Iterator[Violation]:
    config = subject.config
    before_residual = config.get("norm_before_residual")
    if before_residual and engine in ("sglang", "tensorrt_llm"):
        yield config_error(engine, "norm_before_residual", before_residual, "only vLLM has it; false is allowed")
    if before_residual is None and subject.files.is_speculators:
        allowed = "true or false is allowed; vLLM assumes true when the key is absent"
        yield config_error(engine, "norm_before_residual", None, allowed)
    for key in MISSING_NORMS.get(engine, ()):
        if config.get(key):
            yield config_error(engine, key, config[key], f"false is allowed; {ENGINE_NAMES[engine]} has no such norm")
    if engine == "tensorrt_llm" and config.get("norm_before_fc") and not subject.eagle_config.get("norm_before_fc"):
        allowed = "add norm_before_fc: TensorRT-LLM looks for it here only"
        yield config_error(engine, "eagle_config", subject.eagle_config, allowed)


def speculators_sections(subject: Subject, engine: str) -> Iterator[Violation]:
    config = subject.files.config
    if (named := config.get("speculators_model_type")) != "eagle3":
        yield config_error(engine, "speculators_model_type", named, "only 'eagle3' is allowed")
    if not isinstance(layer := config.get("transformer_layer_config"), dict):
        allowed = "a JSON object with the layer's sizes is required"
        yield config_error(engine, "transformer_layer_config", layer, allowed)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        where = "speculators_config.proposal_methods[0].speculative_tokens"
        yield config_error(engine, where, tokens, "a number of draft tokens, 1 or more, is allowed")


def speculators_verifier(subject: Subject, engine: str) -> Iterator[Violation]:
    serving = subject.files.config.get("speculators_config") or {}
    if not (serving.get("verifier") or {}).get("name_or_path"):
        where = "speculators_config.verifier.name_or_path"
        yield config_error(engine, where, None, "give the target's name: vLLM serves that model")


def engine_default(num_layers: int) -> list[int]:
    """The taps that every engine captures if the files name none."""
    return [2, num_layers // 2, num_layers - 3]


def captured_taps(subject: Subject, engine: str) -> list[int]:
    """The hidden_states indices that this engine captures for this head."""
    default = engine_default(subject.frozen.config.num_layers)
    top, nested = subject.config.get(TAPS), subject.eagle_config.get(TAPS)
    if engine == "llama_cpp":
        return list(top or default)
    if engine in ("vllm", "speculators"):
        return list(top or nested or default)  # vLLM reads the ids in eagle_config by its own counting, unshifted
    if engine == "sglang":
        return [layer + 1 for layer in nested] if nested else default
    return list(subject.taps)  # TensorRT-LLM gets them on its command line


def num_captured_taps(subject: Subject, engine: str) -> int:
    """The number of hidden states for which the engine builds `fc`."""
    if engine == "llama_cpp":
        return 3
    if engine in ("vllm", "sglang"):
        return int(subject.config.get("num_aux_hidden_states") or len(subject.eagle_config.get(TAPS) or [0, 0, 0]))
    return len(subject.taps)


def taps(subject: Subject, engine: str) -> Iterator[Violation]:
    wanted, target = list(subject.taps), subject.frozen.config
    captured = captured_taps(subject, engine)
    where = f"eagle_config.{TAPS}" if engine == "sglang" else TAPS
    if captured != wanted:
        named = subject.eagle_config.get(TAPS) if engine == "sglang" else subject.config.get(TAPS)
        right = f"{[tap - 1 for tap in wanted]}, counted as layer outputs," if engine == "sglang" else wanted
        allowed = f"it captures hidden_states {captured} but the head reads {wanted}: {right} is allowed"
        yield config_error(engine, where, named, allowed)
    if wanted != sorted(set(wanted)):
        yield config_error(engine, where, wanted, "ascending indices without repeats are allowed: vLLM sorts them")
    last = target.num_layers - 1 if engine == "sglang" else target.num_layers
    if max(wanted) > last or min(wanted) < 0:
        yield config_error(engine, where, wanted, f"hidden_states 0 to {last} are allowed")
    if not subject.note and wanted == [tap - 1 for tap in engine_default(target.num_layers)]:
        usual = [tap + 1 for tap in wanted]
        allowed = f"do these count layer outputs? the usual taps, counted as vLLM does, are {usual}"
        yield Violation(engine, "warning", f"config.json {where}", wanted, allowed)
    if num_captured_taps(subject, engine) != len(wanted):
        allowed = f"{len(wanted)} is allowed; {engine} builds fc for {num_captured_taps(subject, engine)} hidden states"
        yield config_error(engine, "num_aux_hidden_states", subject.config.get("num_aux_hidden_states"), allowed)
    tapped = len(wanted) * target.hidden_size
    if tapped == subject.config.get("hidden_size") and engine != "vllm":
        allowed = f"{engine} skips fc if its input is as wide as the head; train with more taps"
        yield config_error(engine, where, wanted, allowed)
