"""What the engines read in config.json. Each rule says, for one engine, what is wrong."""

from collections.abc import Iterator
from dataclasses import asdict

from heads.formats.subject import Finding, Subject
from heads.target_config import Rope

ARCHITECTURES = {
    ("eagle3", "vllm"): {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"},
    ("eagle3", "sglang"): {"LlamaForCausalLMEagle3"},
    ("eagle3", "tensorrt_llm"): {"LlamaForCausalLMEagle3", "EAGLE3LlamaForCausalLM", "LlamaForCausalLM"},
    ("eagle1", "vllm"): {"EagleLlamaForCausalLM", "LlamaForCausalLM"},
    ("eagle1", "sglang"): {"LlamaForCausalLMEagle"},
}
REFERENCE_ROPES = {"default", "linear"}


def error(engine: str, where: str, value: object, allowed: str) -> Finding:
    return Finding(engine, "error", f"config.json {where}", value, allowed)


def architectures(subject: Subject, engine: str) -> Iterator[Finding]:
    allowed = ARCHITECTURES.get((subject.layout, engine))
    named = subject.config.get("architectures") or []
    if allowed is not None and not allowed & set(named):
        yield error(engine, "architectures", named, f"{' or '.join(sorted(allowed))} is allowed")


def one_llama_layer(subject: Subject, engine: str) -> Iterator[Finding]:
    config = subject.config
    for key, allowed, when_absent in (
        ("model_type", "llama", None),
        ("num_hidden_layers", 1, None),
        ("hidden_act", "silu", "silu"),
        ("tie_word_embeddings", False, False),
        ("attention_bias", False, False),
        ("mlp_bias", False, False),
    ):
        if config.get(key, when_absent) != allowed:
            yield error(engine, key, config.get(key), f"{allowed!r} is allowed")
    if config.get("bias") and engine != "eagle":
        allowed = "leave it out: engines take it for the attention's bias and leave that uninitialised"
        yield error(engine, "bias", config["bias"], allowed)
    for key in subject.missing_sizes:
        yield error(engine, key, config.get(key), "the head's own size is allowed")


def fits_the_target(subject: Subject, engine: str) -> Iterator[Finding]:
    config, target = subject.config, subject.frozen.config
    if "vocab_size" not in subject.missing_sizes and config["vocab_size"] != target.vocab_size:
        allowed = f"the target's {target.vocab_size} is allowed; a reduced vocabulary stands in draft_vocab_size"
        yield error(engine, "vocab_size", config["vocab_size"], allowed)
    if subject.target_hidden_size not in (None, target.hidden_size):
        key = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        yield error(engine, key, subject.target_hidden_size, f"the target's {target.hidden_size} is allowed")
    positions = config.get("max_position_embeddings")
    if positions is None or positions < target.max_positions:
        allowed = f"the target's {target.max_positions} or more is allowed; drafts beyond it are noise"
        yield error(engine, "max_position_embeddings", positions, allowed)


def rope(subject: Subject, engine: str) -> Iterator[Finding]:
    """Older engines read rope_theta and rope_scaling, newer ones rope_parameters; both must say what was trained."""
    config, target = subject.config, subject.frozen.config
    found = Rope.from_config(config)
    if config.get("rope_parameters") and "rope_theta" in config:
        old = Rope.from_config({key: config.get(key) for key in ("rope_theta", "rope_scaling")})
        if old != found:
            yield error(engine, "rope_theta", asdict(old), f"what rope_parameters says, {asdict(found)}, is allowed")
    if found != target.rope and "target_rope" not in subject.own:
        severity = "error" if subject.own else "warning"
        allowed = f"the target's {asdict(target.rope)} is allowed, unless the head was trained with another"
        yield Finding(engine, severity, "config.json rope_theta", asdict(found), allowed)
    if engine == "eagle" and (found.kind not in REFERENCE_ROPES or (found.kind == "linear" and found.theta != 1e4)):
        allowed = "the reference knows no scaling but linear, and that with base 10000 alone"
        yield error(engine, "rope_scaling", asdict(found), allowed)


def draft_vocabulary(subject: Subject, engine: str) -> Iterator[Finding]:
    size, vocab_size = subject.config.get("draft_vocab_size"), subject.frozen.config.vocab_size
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        allowed = f"the number of tokens that the head drafts, at most {vocab_size}, is allowed, also where it is all"
        yield error(engine, "draft_vocab_size", size, allowed)


def norms(subject: Subject, engine: str) -> Iterator[Finding]:
    config = subject.config
    before_residual = config.get("norm_before_residual")
    if before_residual and engine in ("sglang", "tensorrt_llm", "eagle"):
        yield error(engine, "norm_before_residual", before_residual, "only vLLM has it; false is allowed")
    if before_residual is None and subject.layout == "speculators":
        yield error(
            engine, "norm_before_residual", None, "true or false is allowed; vLLM assumes true when it is absent"
        )
    if engine == "eagle":
        for key in ("fc_norm", "norm_output", "norm_before_fc"):
            if config.get(key):
                yield error(engine, key, config[key], "the reference has no such norm; false is allowed")
    if engine == "tensorrt_llm" and config.get("norm_before_fc") and not subject.eagle_config.get("norm_before_fc"):
        yield error(engine, "eagle_config", subject.eagle_config, "norm_before_fc is looked for there; write it there")


def reference_embedding(subject: Subject, engine: str) -> Iterator[Finding]:
    """The reference takes the target's embedding only where config.json has no target_hidden_size."""
    has_own = "embed_tokens.weight" in subject.tensors
    if "target_hidden_size" in subject.config and not has_own:
        allowed = "leave it out: with it the reference does not take the target's embedding"
        yield error(engine, "target_hidden_size", subject.config["target_hidden_size"], allowed)


def speculators_sections(subject: Subject, engine: str) -> Iterator[Finding]:
    config = subject.files.config
    if config.get("speculators_model_type") != "eagle3":
        yield error(engine, "speculators_model_type", config.get("speculators_model_type"), "'eagle3' is allowed")
    if not isinstance(config.get("transformer_layer_config"), dict):
        yield error(engine, "transformer_layer_config", config.get("transformer_layer_config"), "a section is allowed")
    serving = config.get("speculators_config")
    serving = serving if isinstance(serving, dict) else {}
    methods = serving.get("proposal_methods") or [{}]
    tokens, verifier = methods[0].get("speculative_tokens"), serving.get("verifier") or {}
    if not isinstance(tokens, int) or tokens < 1:
        where = "speculators_config.proposal_methods[0].speculative_tokens"
        yield error(engine, where, tokens, "a whole number of drafted tokens is allowed")
    if not verifier.get("name_or_path"):
        where = "speculators_config.verifier.name_or_path"
        yield error(engine, where, verifier.get("name_or_path"), "the target's name is allowed: vLLM serves that model")
