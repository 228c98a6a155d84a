"""One writer for each format: a head as the config.json and the tensors that an engine reads.

To add one: a function below, an entry in FORMATS, and its rules in contracts.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from heads.base import DraftHead
from heads.checkpoint import head_config
from heads.eagle3 import Eagle3Head
from heads.formats.files import MODEL
from heads.formats.medusa_layout import to_reference_layout
from heads.medusa import MedusaHead

Files = tuple[dict[str, Any], dict[str, Tensor]]
SPECULATORS_VERSION = "0.9.0"  # whose layout is written, where the library itself is not installed


@dataclass(frozen=True)
class ServedTarget:
    """The target as an export names it."""

    name: str  # folder or hub name, as the recipe gives it
    architectures: list[str]
    draft_tokens: int  # drafted at each step
    revision: str | None = None  # of the hub repository; None is its default branch


@dataclass(frozen=True)
class Format:
    files: Callable[[DraftHead, ServedTarget], Files]
    engine: str | None  # whose contract it must meet; None asks nothing
    weights: str = MODEL  # file of the tensors


def native_files(head: DraftHead, target: ServedTarget) -> Files:
    """Our own, as training saves it."""
    return head_config(head), head.engine_tensors()


def engine_files(head: DraftHead, target: ServedTarget) -> Files:
    """What vLLM, SGLang and TensorRT-LLM read."""
    tensors = head.whole_tensors() if isinstance(head, MedusaHead) else head.engine_tensors()
    return head_config(head), tensors


def reference_files(head: DraftHead, target: ServedTarget) -> Files:
    """What the EAGLE authors' code loads (cnets.py for EAGLE-3, cnets1.py for EAGLE-1).

    Raises ValueError for another head.
    """
    if head.kind not in ("eagle1", "eagle3"):
        raise ValueError(f"export.format: 'eagle' given for a head of kind {head.kind}; {head.kind} is allowed for it")
    config, tensors = head_config(head), dict(head.engine_tensors())
    config["architectures"] = ["LlamaForCausalLM"]
    if config["rope_scaling"] is not None:
        config["rope_scaling"] = {"type": config["rope_scaling"]["rope_type"], **config["rope_scaling"]}
    if head.kind == "eagle1":
        config["bias"] = bool(tensors["fc.bias"].any())
        if not config["bias"]:
            del tensors["fc.bias"]
    elif config["target_hidden_size"] == config["hidden_size"]:
        del config["target_hidden_size"]  # where it stands, the target's embedding is not taken
    return config, tensors


def speculators_files(head: DraftHead, target: ServedTarget) -> Files:
    """What speculators and vLLM load as one model that names its verifier.

    Raises ValueError for a head that this layout has no place for.
    """
    if not isinstance(head, Eagle3Head) or head.shape.hidden_size != head.target.hidden_size:
        raise ValueError(
            f"export.format: 'speculators' given for an {head.kind} head of width {head.feature_size}; only "
            f"EAGLE-3 of the target's width, {head.target.hidden_size}, is allowed there; export.format=vllm serves it"
        )
    flat = head_config(head)
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    layer = {key: flat[key] for key in flat if key in LAYER_KEYS}
    if len(head.taps) != 3:
        layer["num_aux_hidden_states"] = len(head.taps)  # vLLM takes it from this section alone
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": installed_version("speculators", SPECULATORS_VERSION),
        "transformers_version": version("transformers"),
        "dtype": flat["torch_dtype"],
        "tie_word_embeddings": False,
        **{name: flat[name] for name in names},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "transformer_layer_config": layer,
        "speculators_config": speculators_section(target),
        "headstart": flat["headstart"],
    }
    tensors = {reference_to_layer(name): tensor for name, tensor in head.engine_tensors().items()}
    if not head.shape.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding
    return config, tensors


LAYER_KEYS = {
    "model_type",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_parameters",
}


def medusa_files(head: DraftHead, target: ServedTarget) -> Files:
    """What the Medusa authors' code loads (medusa_model.py), and vLLM too.

    Raises ValueError for a head that this layout has no place for.
    """
    if not isinstance(head, MedusaHead):
        raise ValueError(f"export.format: 'medusa' given for a head of kind {head.kind}; it holds Medusa heads alone")
    try:
        tensors = to_reference_layout(head.whole_tensors())
    except ValueError as error:
        raise ValueError(f"export.format: 'medusa' given, but {error}") from error
    ours = head_config(head)
    kept = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "medusa_fc_bias", "torch_dtype")
    config = {key: ours[key] for key in kept}  # but for the first two, what vLLM needs of it
    return {"base_model_name_or_path": target.name, **config, "headstart": ours["headstart"]}, tensors


def speculators_section(target: ServedTarget) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": target.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": target.name, "architectures": target.architectures},
    }


def reference_to_layer(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def installed_version(package: str, otherwise: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


FORMATS = {
    "native": Format(native_files, None),
    "vllm": Format(engine_files, "vllm"),
    "sglang": Format(engine_files, "sglang"),
    "tensorrt_llm": Format(engine_files, "tensorrt_llm"),
    "eagle": Format(reference_files, "eagle"),
    "speculators": Format(speculators_files, "speculators"),
    "medusa": Format(medusa_files, "medusa", "medusa_lm_head.pt"),
}
