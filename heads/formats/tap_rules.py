"""Rules for taps: which hidden states an engine would hand to the head, compared with those that the head reads.

Let i be the Hugging Face index: hidden_states[i] is the input of layer i. vLLM and speculators use i; SGLang and
TensorRT-LLM name the layer that outputs it, i - 1. Mixing the two up raises no error, it only costs acceptance.
"""

from collections.abc import Iterator

from headstart.heads.formats.subject import Subject
from headstart.heads.formats.violation import Violation, config_error

KEY = "eagle_aux_hidden_state_layer_ids"


def engine_default(num_layers: int) -> list[int]:
    """The taps that every engine captures if the files name none."""
    return [2, num_layers // 2, num_layers - 3]


def captured_taps(subject: Subject, engine: str) -> list[int]:
    """The hidden_states indices that this engine captures for this head."""
    default = engine_default(subject.frozen.config.num_layers)
    top, nested = subject.config.get(KEY), subject.eagle_config.get(KEY)
    if engine in ("vllm", "speculators"):
        return list(top or nested or default)  # vLLM reads the ids in eagle_config by its own counting, unshifted
    if engine == "sglang":
        return [layer + 1 for layer in nested] if nested else default
    return default if engine == "eagle" else list(subject.taps)  # TensorRT-LLM gets them on its command line


def num_captured_taps(subject: Subject, engine: str) -> int:
    """The number of hidden states for which the engine builds `fc`."""
    if engine == "eagle":
        return 3
    if engine in ("vllm", "sglang"):
        return int(subject.config.get("num_aux_hidden_states") or len(subject.eagle_config.get(KEY) or [0, 0, 0]))
    return len(subject.taps)


def taps(subject: Subject, engine: str) -> Iterator[Violation]:
    wanted, target = list(subject.taps), subject.frozen.config
    found = captured_taps(subject, engine)
    where = f"eagle_config.{KEY}" if engine == "sglang" else KEY
    if found != wanted:
        named = subject.eagle_config.get(KEY) if engine == "sglang" else subject.config.get(KEY)
        allowed = f"it captures hidden_states {found} but the head reads {wanted}: {advice(engine, wanted)}"
        yield config_error(engine, where, named, allowed)
    if wanted != sorted(set(wanted)):
        yield config_error(engine, where, wanted, "ascending indices without repeats are allowed: vLLM sorts them")
    last = target.num_layers - 1 if engine == "sglang" else target.num_layers
    if max(wanted) > last or min(wanted) < 0:
        yield config_error(engine, where, wanted, f"hidden_states 0 to {last} are allowed")
    if not subject.own and wanted == [tap - 1 for tap in engine_default(target.num_layers)]:
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


def advice(engine: str, wanted: list[int]) -> str:
    if engine == "sglang":
        return f"{[tap - 1 for tap in wanted]}, counted as layer outputs, is allowed"
    if engine == "eagle":
        return "the EAGLE authors' code has no option for other taps"
    return f"{wanted} is allowed"
