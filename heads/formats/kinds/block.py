"""The layouts of block heads: DFlash's and DSpark's own and speculators', whose loaders fill in most missing keys."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from headstart.heads.files import HeadFiles
from headstart.heads.formats import commands, config_rules, steps, tensor_rules
from headstart.heads.formats.config_rules import engine_default
from headstart.heads.formats.speculators import speculators_config
from headstart.heads.formats.subject import (
    LAYER_SIZES,
    Files,
    Layout,
    Rule,
    ServedTarget,
    Step,
    Subject,
    Translation,
    Violation,
    config_error,
    tensor_error,
)
from headstart.heads.kinds.block import CONFIDENCE, BlockHead
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.block_config import (
    HIDDEN_STATES,
    LAYER_OUTPUTS,
    NESTED,
    BlockShape,
    block_key,
    is_block_config,
    layer_reaches,
    slot_misfits,
)
from headstart.heads.kinds.checkpoint import head_config

BLOCK_KEYS = ("draft_vocab_size", "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
DSPARK_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head")
ARCHITECTURES: set[str | None] = {"DFlashDraftModel", "Qwen3DSparkModel", "DFlashSpeculator", "DSparkSpeculator"}


def is_block(files: HeadFiles) -> bool:
    return is_block_config(files.config) or "hidden_norm.weight" in files.names


def slots(subject: Subject, engine: str) -> Iterator[Violation]:
    """With another number of slots a head drafts worse at every depth; by another convention no draft is accepted."""
    config = subject.config
    for key, value, allowed in slot_misfits(config, subject.frozen.config):
        yield config_error(engine, key, value, allowed)
    rank, token = block_key(config, "markov_rank", 0), block_key(config, "mask_token_id")
    if engine == "sglang" and block_key(config, "sample_from_anchor") and not rank:
        allowed = "1 or more is allowed: SGLang serves heads that sample from the anchor only with a Markov head"
        yield config_error(engine, "markov_rank", rank, allowed)
    d2t = subject.tensors.get("d2t")
    if d2t is not None and d2t.ndim == 1 and not d2t.is_floating_point():
        ids = d2t.long() + d2t.new_ones(len(d2t)).long().cumsum(0) - 1
        if token in ids.tolist():
            allowed = "a token outside the draft vocabulary is allowed: the head would draft its own mark for a slot"
            yield config_error(engine, "mask_token_id", token, allowed)


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
        key = "sliding_window_non_causal" if subject.files.is_speculators else "is_causal"
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
        if not subject.files.is_speculators:
            switch = (config.get(NESTED) or {}).get("causal")
        elif config["speculators_model_type"] == "dflash":
            switch = non_causal is False
    return own_causal if switch is None else bool(switch)


def taps(subject: Subject, engine: str) -> Iterator[Violation]:
    """`target_layer_ids` count outputs of layers, `aux_hidden_state_layer_ids` hidden_states, which are one more."""
    num_layers = subject.frozen.config.num_layers
    key = HIDDEN_STATES if subject.files.is_speculators else LAYER_OUTPUTS
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
        yield tensor_error(engine, name, None, "a reduced draft vocabulary needs both d2t and lm_head.weight")


def infer_slots(subject: Subject, translation: Translation) -> None:
    """The slot convention, which the first DFlash and DSpark files do not name, and the layers that the head reads."""
    if subject.files.is_speculators and (named := subject.config["speculators_model_type"]) not in ("dflash", "dspark"):
        translation.refused.append(f"speculators_model_type {named!r}: only 'dflash' and 'dspark' are allowed")
    if block_key(subject.config, "sample_from_anchor") is None:
        is_dspark = "DSparkModel" in str(subject.config.get("architectures"))
        if subject.files.is_speculators:
            takes = "vLLM takes false, speculators true for dspark"
            translation.refused.append(f"sample_from_anchor: missing; {takes}: add the one of training")
        translation.config["sample_from_anchor"] = is_dspark
        value, authors = ("true", "DeepSpec") if is_dspark else ("false", "the DFlash authors")
        translation.inferred.append(f"sample_from_anchor: missing, so {value}, the only convention of {authors}")
    if not subject.taps:
        takes = f"vLLM takes hidden_states {engine_default(subject.frozen.config.num_layers)}"
        translation.refused.append(f"{LAYER_OUTPUTS}: missing; {takes}; add the layers of its training")
    elif not subject.note:
        key = HIDDEN_STATES if subject.files.is_speculators else LAYER_OUTPUTS
        translation.inferred.append(f"taps: hidden_states {list(subject.taps)}, from {key}")


def speculators_block_files(head: BlockHead, target: ServedTarget) -> Files:
    """The files that speculators and vLLM load as one model, as speculators' dspark or dflash."""
    if any(reach.causal for reach in head.shape.reaches if reach.window is None):
        given = "export.format: 'speculators' given for a head that is causal within the block (head.causal)"
        raise ValueError(f"{given}; vllm and native are allowed for it: choose one of them")
    target = replace(target, draft_tokens=head.shape.levels)
    if head.shape.method == "dspark":
        config = speculators_config(head, target, "dspark", "DSparkSpeculator", (*BLOCK_KEYS, *DSPARK_KEYS))
    else:
        config = speculators_config(head, target, "dflash", "DFlashSpeculator", BLOCK_KEYS)
    config["aux_hidden_state_layer_ids"] = list(head.taps)
    layer, flat = config["transformer_layer_config"], head_config(head)
    layer |= {key: flat[key] for key in ("layer_types", "sliding_window", "is_causal") if key in flat}
    layer["use_sliding_window"] = flat["sliding_window"] is not None  # Qwen3's config drops the window without it
    tensors = head.engine_tensors()
    if not head.vocab.is_full:
        tensors["t2d"] = head.vocab.members()
    return config, tensors


def draft_vocabulary(subject: Subject, engine: str) -> Iterator[Violation]:
    """Without the key it is the whole vocabulary."""
    if subject.config.get("draft_vocab_size") is not None:
        yield from config_rules.draft_vocabulary(subject, engine)


def needed(subject: Subject, engine: str) -> dict[str, Tensor]:
    config, (frozen, vocab) = subject.config, tensor_rules.sized_target(subject)
    rank = block_key(config, "markov_rank", 0)
    shape = BlockShape.from_config(
        tensor_rules.layer_sizes(subject),
        frozen.config,
        taps=subject.taps,
        reaches=(Reach(),) * config["num_hidden_layers"],
        block_size=2,
        mask_token_id=0,
        markov_rank=rank,
        markov_gate=rank > 0 and block_key(config, "markov_head_type") == "gated",
    )
    tensors: dict[str, Tensor] = BlockHead(shape, frozen, vocab).state_dict()
    if block_key(config, "enable_confidence_head"):
        read = config["hidden_size"] + (rank if block_key(config, "confidence_head_with_markov", True) else 0)
        tensors |= dict(zip(CONFIDENCE, (torch.empty(1, read), torch.empty(1)), strict=True))
    return tensors


def vllm(head: BlockHead, target: ServedTarget, folder: Path) -> str:
    """Any other number of tokens than the block was trained with collapses acceptance."""
    return commands.vllm_command(head.shape.method, head, replace(target, draft_tokens=head.shape.levels), folder)


def sglang(head: BlockHead, target: ServedTarget, folder: Path) -> str:
    name, size = head.shape.method.upper(), head.shape.block_size
    count = f"dspark-block-size {size}" if name == "DSPARK" else f"num-draft-tokens {size}"
    option = f"--speculative-draft-model-path {quote(str(folder))}"
    launch = commands.sglang_launch(target)
    return f"```\n{launch} \\\n    --speculative-algorithm {name} {option} --speculative-{count}\n```"


def speculators_command(head: BlockHead, target: ServedTarget, folder: Path) -> str:
    name = "DSparkDraftModel" if head.shape.method == "dspark" else "DFlashDraftModel"
    return commands.speculators_command(head.shape.method, name, folder)


RULES: tuple[Rule, ...] = (
    config_rules.architectures,
    config_rules.layer_options,
    slots,
    causality,
    taps,
    own_lm_head,
    tensor_rules.names_and_shapes,
    config_rules.fits_the_target,
    config_rules.rope,
    draft_vocabulary,
    *tensor_rules.WEIGHTS,
)
STEPS: tuple[Step, ...] = (
    steps.infer_rope,
    steps.infer_attention,
    infer_slots,
    steps.share_embedding,
    steps.infer_vocabulary,
    steps.leave_out_unused,
)
BLOCK = Layout(
    name="block",
    kind=BlockHead,
    recognises=is_block,
    rules=dict.fromkeys(("vllm", "sglang"), RULES),
    commands={"vllm": vllm, "sglang": sglang},
    steps=STEPS,
    needed=needed,
    optional=frozenset({"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"}),
    sizes=(*LAYER_SIZES, "num_hidden_layers"),
    architectures=dict.fromkeys(("vllm", "sglang", "speculators"), ARCHITECTURES),
)
SPECULATORS_BLOCK = replace(
    BLOCK,
    name="speculators_block",
    recognises=lambda files: is_block(files) and files.is_speculators,
    rules=dict.fromkeys(("vllm", "speculators"), (*RULES, draft_length, config_rules.speculators_verifier)),
    commands={"vllm": commands.speculators_vllm_command, "speculators": speculators_command},
    write=speculators_block_files,
)
