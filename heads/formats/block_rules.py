"""Rules for block heads in vLLM, SGLang and speculators, whose loaders silently fill in most missing keys."""

from collections.abc import Iterator

from headstart.heads.formats.config_rules import engine_default
from headstart.heads.formats.subject import MISSING, SPECULATORS_BLOCK, Subject, Violation, config_error, tensor_error
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.block_config import (
    HIDDEN_STATES,
    LAYER_OUTPUTS,
    NEEDED,
    NESTED,
    block_key,
    layer_reaches,
    trained_block_size,
)


def block_size(subject: Subject, engine: str) -> Iterator[Violation]:
    """The number of slots is fixed by training; another one drafts worse at every depth."""
    size = block_key(subject.config, "block_size")
    if not isinstance(size, int) or size < 2:
        allowed = f"the number of slots that the head was trained with is allowed: without it {NEEDED['block_size']}"
        yield config_error(engine, "block_size", size, allowed)
    elif size > (trained := trained_block_size(subject.config)):
        allowed = f"2 to the {trained} slots that the head was trained with is allowed"
        yield config_error(engine, "block_size", size, allowed)


def slot_convention(subject: Subject, engine: str) -> Iterator[Violation]:
    """Whether slot k predicts the token at its own position or the next one; off by one, no draft is accepted."""
    if block_key(subject.config, "sample_from_anchor") is None:
        default = "false, for dspark too" if subject.layout == SPECULATORS_BLOCK else "true for DSpark alone"
        allowed = f"true or false is required: without the key an engine assumes {default}"
        yield config_error(engine, "sample_from_anchor", None, allowed)
    rank = block_key(subject.config, "markov_rank", 0)
    if engine == "sglang" and block_key(subject.config, "sample_from_anchor") and not rank:
        allowed = "1 or more is allowed: SGLang serves heads that sample from the anchor only with a Markov head"
        yield config_error(engine, "markov_rank", rank, allowed)


def causality(subject: Subject, engine: str) -> Iterator[Violation]:
    """Whether slots see the later slots of their block: most engines have one switch for all layers."""
    try:
        reaches = [*layer_reaches(subject.config)]
    except KeyError:  # without num_hidden_layers
        return
    except ValueError as error:
        yield config_error(engine, "layer_types", subject.config.get("layer_types"), str(error))
        return
    wrong = [number for number, reach in enumerate(reaches) if makes_causal(subject, engine, reach) != reach.causal]
    if wrong:
        key = "sliding_window_non_causal" if subject.layout == SPECULATORS_BLOCK else "is_causal"
        right = "one kind of layers"
        if len({reach.causal for reach in reaches}) == 1:
            right = f"is_causal {str(reaches[0].causal).lower()} with the layers' sizes"
        how = "not causal" if reaches[wrong[0]].causal else "causal"
        allowed = f"{right} is allowed: {engine} makes layers {wrong} {how} within the block, unlike in training"
        yield config_error(engine, key, subject.config.get(key), allowed)


def makes_causal(subject: Subject, engine: str, reach: Reach) -> bool:
    """Whether an engine makes a layer of this reach causal within the block, by its own reading of the keys.

    Read from vLLM 0.33 (qwen3_dflash.py, configs/speculators/algos.py), SGLang 0.5.23 (models/dflash.py) and
    speculators 0.9 (models/dflash).
    """
    config, switch = subject.config, subject.config.get("is_causal")
    own_causal = reach.window is not None  # what all of them do with a layer that no key names
    non_causal = config.get("sliding_window_non_causal")
    if engine == "speculators":
        return own_causal and not non_causal
    if engine == "vllm" and switch is None:
        if subject.layout != SPECULATORS_BLOCK:
            switch = (config.get(NESTED) or {}).get("causal")
        elif config["speculators_model_type"] == "dflash":
            switch = non_causal is False
    return own_causal if switch is None else bool(switch)


def mask_token(subject: Subject, engine: str) -> Iterator[Violation]:
    """The token whose embedding fills the slots: a row of the embedding, and never one that the head drafts."""
    token, target = block_key(subject.config, "mask_token_id"), subject.frozen.config
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        allowed = f"0 to {target.vocab_size - 1} is allowed, a row of the target's embedding"
        allowed += f": without the key {NEEDED['mask_token_id']}" if token is None else ""
        yield config_error(engine, "mask_token_id", token, allowed)
        return
    d2t = subject.tensors.get("d2t")
    if d2t is not None and d2t.ndim == 1 and not d2t.is_floating_point():
        ids = d2t.long() + d2t.new_ones(len(d2t)).long().cumsum(0) - 1
        if bool((ids == token).any()):
            allowed = "a token outside the draft vocabulary is allowed: the head would draft its own mark for a slot"
            yield config_error(engine, "mask_token_id", token, allowed)


def taps(subject: Subject, engine: str) -> Iterator[Violation]:
    """`target_layer_ids` count outputs of layers, `aux_hidden_state_layer_ids` hidden_states, which are one more."""
    num_layers = subject.frozen.config.num_layers
    key = HIDDEN_STATES if subject.layout == SPECULATORS_BLOCK else LAYER_OUTPUTS
    named = block_key(subject.config, key)
    if not named:
        takes = f"vLLM takes hidden_states {engine_default(num_layers)}, SGLang as many as the head has layers"
        allowed = f"the layers that the head was trained with are required: without the key {takes}"
        yield config_error(engine, key, named, allowed)
        return
    counted = [layer if key == HIDDEN_STATES else layer + 1 for layer in named]
    trained = subject.note.get("taps")
    if trained and list(trained) != counted:
        right = trained if key == HIDDEN_STATES else [tap - 1 for tap in trained]
        allowed = f"it captures hidden_states {counted} but the head reads {trained}: {right} is allowed"
        yield config_error(engine, key, named, allowed)
    again = (subject.config.get(NESTED) or {}).get(key)
    if again and list(again) != list(named):
        yield config_error(engine, f"{NESTED}.{key}", again, f"{named} is allowed, as at the top level")
    if min(counted) < 0 or max(counted) > num_layers:
        yield config_error(engine, key, named, f"ids of the target's {num_layers} layers are allowed")
    elif max(counted) == num_layers:
        allowed = "correct only if trained on the last layer's output without the final norm, which Hugging Face adds"
        yield Violation(engine, "warning", f"config.json {key}", named, allowed)
    if engine == "sglang" and min(counted) == 0:
        yield config_error(engine, key, named, "outputs of layers are allowed: SGLang cannot capture the embedding")


def draft_length(subject: Subject, engine: str) -> Iterator[Violation]:
    """The draft length must be what a block of this size and convention fills."""
    serving = subject.files.config.get("speculators_config") or {}
    methods = serving.get("proposal_methods") or [{}]
    tokens, size = methods[0].get("speculative_tokens"), block_key(subject.config, "block_size")
    levels = size if block_key(subject.config, "sample_from_anchor") else (size or 1) - 1
    if tokens != levels:
        where = "speculators_config.proposal_methods[0].speculative_tokens"
        yield config_error(engine, where, tokens, f"{levels} is allowed: another number collapses acceptance")


def own_lm_head(subject: Subject, engine: str) -> Iterator[Violation]:
    has_own = "lm_head.weight" in subject.tensors
    if ("d2t" in subject.tensors) != has_own and subject.draft_vocab_size != subject.config.get("vocab_size"):
        name = "d2t" if has_own else "lm_head.weight"
        yield tensor_error(engine, name, MISSING, "a reduced draft vocabulary needs both d2t and lm_head.weight")
