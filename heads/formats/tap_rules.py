"""Which hidden states an engine would hand to the head, by its own way of counting, against those that it reads.

Let i be the Hugging Face index: hidden_states[i] enters layer i. vLLM and speculators count so; SGLang and TensorRT-LLM
name the layer whose output it is, i - 1. Nothing fails when they are taken for one another.
"""

from collections.abc import Iterator

from heads.formats.config_rules import error
from heads.formats.subject import Finding, Subject

KEY = "eagle_aux_hidden_state_layer_ids"


def engine_default(num_layers: int) -> list[int]:
    """Where every engine looks when it is told nothing."""
    return [2, num_layers // 2, num_layers - 3]


def captured(subject: Subject, engine: str) -> list[int]:
    """The hidden_states that this engine captures for this head."""
    default = engine_default(subject.frozen.config.num_layers)
    top, beside = subject.config.get(KEY), subject.eagle_config.get(KEY)
    if engine in ("vllm", "speculators"):
        return list(top or beside or default)  # vLLM takes those beside as they stand, in its own counting
    if engine == "sglang":
        return [layer + 1 for layer in beside] if beside else default
    return default if engine == "eagle" else list(subject.taps)  # TensorRT-LLM is told on its command line


def num_captured(subject: Subject, engine: str) -> int:
    """How many it builds `fc` for."""
    if engine == "eagle":
        return 3
    if engine in ("vllm", "sglang"):
        return int(subject.config.get("num_aux_hidden_states") or len(subject.eagle_config.get(KEY) or [0, 0, 0]))
    return len(subject.taps)


def taps(subject: Subject, engine: str) -> Iterator[Finding]:
    wanted, target = list(subject.taps), subject.frozen.config
    found = captured(subject, engine)
    where = f"eagle_config.{KEY}" if engine == "sglang" else KEY
    if found != wanted:
        told = subject.eagle_config.get(KEY) if engine == "sglang" else subject.config.get(KEY)
        allowed = f"it captures hidden_states {found} and the head reads {wanted}: {advice(engine, wanted)}"
        yield error(engine, where, told, allowed)
    if wanted != sorted(set(wanted)):
        yield error(engine, where, wanted, "ascending indices, each once, are allowed: vLLM sorts them")
    last = target.num_layers - 1 if engine == "sglang" else target.num_layers
    if max(wanted) > last or min(wanted) < 0:
        yield error(engine, where, wanted, f"hidden_states 0 to {last} are allowed")
    if not subject.own and wanted == [tap - 1 for tap in engine_default(target.num_layers)]:
        allowed = f"is it counted as layer outputs? the usual place, counted as vLLM does, is {[w + 1 for w in wanted]}"
        yield Finding(engine, "warning", f"config.json {where}", wanted, allowed)
    if num_captured(subject, engine) != len(wanted):
        allowed = f"{len(wanted)} is allowed; {engine} builds fc for {num_captured(subject, engine)} hidden states"
        yield error(engine, "num_aux_hidden_states", subject.config.get("num_aux_hidden_states"), allowed)
    tapped = len(wanted) * target.hidden_size
    if tapped == subject.config.get("hidden_size") and engine != "vllm":
        allowed = f"{engine} skips fc where its input is as wide as the head; read more hidden states"
        yield error(engine, where, wanted, allowed)


def advice(engine: str, wanted: list[int]) -> str:
    if engine == "sglang":
        return f"{[tap - 1 for tap in wanted]}, counted as layer outputs, is allowed"
    if engine == "eagle":
        return "the reference has no option for others"
    return f"{wanted} is allowed"
