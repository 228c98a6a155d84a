"""The layouts of EAGLE-1, EAGLE-3 and P-EAGLE heads: what recognises, checks, translates and serves them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headstart.heads.files import HeadFiles
from headstart.heads.formats import commands, config_rules, steps, tensor_rules
from headstart.heads.formats.config_rules import engine_default, num_captured_taps
from headstart.heads.formats.speculators import not_in_speculators, speculators_config
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
from headstart.heads.kinds.eagle1 import Eagle1Head, Eagle1Shape
from headstart.heads.kinds.eagle3 import NORM_FLAGS, TAPS, Eagle3Head, midlayer_name
from headstart.heads.kinds.peagle import MASK_TOKEN_KEYS, PEagleHead, named_mask_token


def is_eagle3(files: HeadFiles) -> bool:
    """Whether it has tensors that only EAGLE-3 heads have."""
    names = files.names
    return bool({"layers.0.hidden_norm.weight", "d2t"} & names) or any(name.startswith("midlayer.") for name in names)


def speculators_files(head: Eagle3Head, target: ServedTarget) -> Files:
    """The files that speculators and vLLM load as one model, which names its target (their "verifier")."""
    if head.shape.hidden_size != head.target.hidden_size:
        raise not_in_speculators(head)
    config = speculators_config(head, target, "eagle3", "Eagle3DraftModel", ("draft_vocab_size", *NORM_FLAGS))
    if len(head.taps) != 3:
        config["transformer_layer_config"]["num_aux_hidden_states"] = len(head.taps)  # vLLM reads it in this section
    config |= {
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.engine_tensors().items()}
    if not head.shape.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding
    return config, tensors


def eagle1_tensors(subject: Subject, engine: str) -> dict[str, Tensor]:
    frozen, vocab = tensor_rules.sized_target(subject)
    shape = Eagle1Shape.from_config(tensor_rules.layer_sizes(subject), frozen.config)
    return Eagle1Head(shape, frozen, vocab).state_dict()


def eagle3_tensors(subject: Subject, engine: str) -> dict[str, Tensor]:
    config, kind = subject.config, subject.layout.kind
    frozen, vocab = tensor_rules.sized_target(subject)
    taps = [*range(num_captured_taps(subject, engine))]
    norm_before_fc = bool(config.get("norm_before_fc") or subject.eagle_config.get("norm_before_fc"))
    sizes = {**tensor_rules.layer_sizes(subject), TAPS: taps, "norm_before_fc": norm_before_fc, "mask_token_id": 0}
    assert issubclass(kind, Eagle3Head)
    tensors = kind(kind.config_shape(sizes, {}, frozen.config), frozen, vocab).state_dict()
    return tensors if len(vocab.ids) == config["vocab_size"] else {**tensors, "d2t": vocab.ids}


def spelling(subject: Subject, engine: str) -> Iterator[Violation]:
    """speculators names the layer layers.0 and never midlayer; the other engines read both."""
    for name in sorted(subject.files.tensors):
        if name.startswith("midlayer."):
            yield tensor_error(engine, name, name, f"layers.0.{name.removeprefix('midlayer.')} is allowed")


def other_embedding(subject: Subject, engine: str) -> Iterator[Violation]:
    """An embedding of its own, which engines replace by the target's if both have the same shape."""
    own, target = subject.tensors.get("embed_tokens.weight"), subject.frozen.embedding
    if own is not None and own.shape == target.shape and not torch.equal(own, target.to(own.dtype)):
        allowed = f"only the target's own is allowed: {engine} uses that one anyway"
        yield tensor_error(engine, "embed_tokens.weight", "an embedding other than the target's", allowed)


def copied_embedding(subject: Subject, engine: str) -> Iterator[Violation]:
    if subject.tensors.get("embed_tokens.weight") is None:
        allowed = f"a copy of the target's embedding, {list(subject.frozen.embedding.shape)}, is required"
        yield tensor_error(engine, "embed_tokens.weight", None, allowed)


def eagle1_bias(subject: Subject, engine: str) -> Iterator[Violation]:
    """vLLM silently drops the bias of `fc`; SGLang always has one and leaves it uninitialised if the file has none."""
    bias = subject.tensors.get("fc.bias")
    if engine == "vllm" and bias is not None and bool(bias.any()):
        yield tensor_error(engine, "fc.bias", "a nonzero bias", "zeros are allowed: vLLM silently drops this tensor")
    if engine == "sglang" and bias is None:
        yield tensor_error(engine, "fc.bias", None, "add zeros: SGLang leaves an absent one uninitialised")


def mask_token(subject: Subject, engine: str) -> Iterator[Violation]:
    """The token of mask entries: a row of the embedding, best one that no text holds."""
    token, vocab_size = named_mask_token(subject.config), subject.frozen.config.vocab_size
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        allowed = f"0 to {vocab_size - 1} is allowed, a row of the target's embedding"
        yield config_error(engine, MASK_TOKEN_KEYS[0], token, allowed)


def refuse_other_layers(subject: Subject, translation: Translation) -> None:
    """Refuse what a config.json may ask for but our layers cannot do."""
    config = subject.config
    if subject.layout.kind is not PEagleHead and config.get("pard_token") is not None:
        why = "a P-EAGLE head, which has both and vLLM's own layout"
        translation.refused.append(f"pard_token, mask_hidden: {why}; get its files in that layout")
    if (named := config.get("speculators_model_type", "eagle3")) != "eagle3":
        translation.refused.append(f"speculators_model_type {named!r}: eagle3, dflash and dspark are allowed")
    for key, allowed in (("hidden_act", "silu"), ("model_type", "llama")):
        if config.get(key, allowed) != allowed:
            translation.refused.append(f"{key} {config[key]!r}: only {allowed!r} is allowed")
    for key, only in (("use_aux_hidden_state", True), ("parallel_draft_step", 1)):
        if subject.eagle_config.get(key, only) != only:
            translation.refused.append(f"eagle_config.{key} {subject.eagle_config[key]!r}: only {only!r} is allowed")
    if "sliding_attention" in (config.get("layer_types") or []):
        translation.refused.append("layer_types with sliding_attention: only full_attention is allowed")


def infer_taps(subject: Subject, translation: Translation) -> None:
    """Which hidden states the head reads, from ids in either counting; their number must match the width of `fc`."""
    top, nested = subject.config.get(TAPS), subject.eagle_config.get(TAPS)
    taps = list(subject.taps)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        differ = f"{TAPS} {top} and eagle_config's {nested} name different hidden states"
        translation.refused.append(f"{differ}; eagle_config counts layer outputs, one less: remove the wrong list")
    if nested and not top and not subject.note:
        translation.inferred.append(f"taps: hidden_states {taps}, as eagle_config counts layer outputs {nested}")
    elif not top and not subject.note:
        translation.inferred.append(f"taps: hidden_states {taps}, the default of every engine")
        if taps != engine_default(subject.frozen.config.num_layers):
            translation.refused.append(f"{TAPS}: missing, and the default taps collide in such a small target; add it")
    translation.config[TAPS] = taps


def flatten_norms(subject: Subject, translation: Translation) -> None:
    if subject.eagle_config.get("norm_before_fc"):
        translation.config["norm_before_fc"] = True
        translation.inferred.append("norm_before_fc: from eagle_config")
    if absent := [key for key in NORM_FLAGS if key not in translation.config]:
        translation.inferred.append(f"{', '.join(absent)}: missing, so false")
    if subject.files.is_speculators and "norm_before_residual" not in subject.config:
        translation.refused.append("norm_before_residual: missing; vLLM assumes true, speculators false: add it")


SHARED: tuple[Rule, ...] = (
    config_rules.architectures,
    config_rules.layer_options,
    config_rules.llama_layers,
    config_rules.fits_the_target,
    config_rules.positions,
    config_rules.rope,
    tensor_rules.names_and_shapes,
    *tensor_rules.WEIGHTS,
)
RULES: tuple[Rule, ...] = (
    *SHARED,
    config_rules.gives_hidden_states,
    config_rules.draft_vocabulary,
    config_rules.norms,
    config_rules.taps,
    tensor_rules.vocabulary_map,
)
SPECULATORS: tuple[Rule, ...] = (*RULES, config_rules.speculators_sections, config_rules.speculators_verifier)
STEPS: tuple[Step, ...] = (refuse_other_layers, steps.infer_rope, steps.infer_attention)
EAGLE3_STEPS: tuple[Step, ...] = (*STEPS, infer_taps, steps.infer_vocabulary, flatten_norms)

EAGLE1 = Layout(
    name="eagle1",
    kind=Eagle1Head,
    recognises=lambda files: {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= files.names,
    rules=dict.fromkeys(("vllm", "sglang"), (*SHARED, other_embedding, eagle1_bias)),
    commands={"vllm": partial(commands.vllm_command, "eagle"), "sglang": partial(commands.sglang_command, "EAGLE")},
    steps=(*STEPS, steps.share_embedding),
    float8=frozenset({"vllm"}),  # since vllm#28435
    needed=eagle1_tensors,
    optional=frozenset({"fc.bias", "embed_tokens.weight"}),
    architectures={"vllm": {"EagleLlamaForCausalLM", "LlamaForCausalLM"}, "sglang": {"LlamaForCausalLMEagle"}},
)
EAGLE3 = Layout(
    name="eagle3",
    kind=Eagle3Head,
    recognises=is_eagle3,
    rules={
        "vllm": RULES,
        "sglang": (*RULES, other_embedding),
        "tensorrt_llm": (*RULES, other_embedding),
        "llama_cpp": RULES,
    },
    commands={
        "vllm": partial(commands.vllm_command, "eagle3"),
        "sglang": partial(commands.sglang_command, "EAGLE3"),
        "tensorrt_llm": commands.tensorrt_llm_command,
        "llama_cpp": commands.llama_cpp_command,
    },
    steps=(*EAGLE3_STEPS, steps.share_embedding),
    float8=frozenset({"vllm"}),
    needed=eagle3_tensors,
    optional=frozenset({"d2t", "t2d", "embed_tokens.weight"}),
    architectures={
        "vllm": {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"},
        "sglang": {"LlamaForCausalLMEagle3"},
        "tensorrt_llm": {"LlamaForCausalLMEagle3", "EAGLE3LlamaForCausalLM", "LlamaForCausalLM"},
        "llama_cpp": {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"},
    },
    rename=midlayer_name,
    captured_taps=config_rules.captured_taps,
)
PEAGLE = replace(
    EAGLE3,
    name="peagle",
    kind=PEagleHead,
    recognises=lambda files: "mask_hidden" in files.names and not files.is_speculators,
    rules={"vllm": (*RULES, mask_token)},  # no other engine has its drafting pass
    commands={"vllm": partial(commands.vllm_command, "eagle3", parallel_drafting=True)},
    sizes=(*LAYER_SIZES, "num_hidden_layers"),
    architectures={"vllm": {*EAGLE3.architectures["vllm"], "PeagleLlamaForCausalLM", "PEagleDraftModel"}},
)
EAGLE3_SPECULATORS = replace(
    EAGLE3,
    name="speculators",
    recognises=lambda files: files.is_speculators,
    rules={"vllm": SPECULATORS, "speculators": (*SPECULATORS, copied_embedding, spelling)},
    commands={
        "vllm": commands.speculators_vllm_command,
        "speculators": lambda head, target, folder: commands.speculators_command("eagle3", "Eagle3DraftModel", folder),
    },
    steps=(*EAGLE3_STEPS, steps.leave_out_unused, steps.share_embedding),
    architectures={},
    write=speculators_files,
)
