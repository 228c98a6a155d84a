"""The export formats: for each, a function that turns a head into the config.json and tensors that an engine reads.

Each raises ValueError for a head that its layout cannot hold. To add a format, write such a function, add it to
FORMATS, and add its rules to lint.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.checkpoint import head_config
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.kinds.medusa import MedusaHead

Files = tuple[dict[str, Any], dict[str, Tensor]]
GGUF = "head.gguf"  # the file that llama.cpp reads
SPECULATORS_VERSION = "0.9.0"  # the version whose layout is written


@dataclass(frozen=True)
class ServedTarget:
    """The target and the draft length that an export's files and commands name."""

    name: str  # folder or hub name, as the recipe gives it
    architectures: list[str]
    draft_tokens: int  # per step
    revision: str | None = None  # hub branch, tag or commit; None is the default branch


@dataclass(frozen=True)
class Format:
    files: Callable[[DraftHead, ServedTarget], Files]
    engine: str | None  # the engine whose contract an export must meet; None asks nothing


def is_whole_target(head: DraftHead, export_format: str) -> bool:
    """Whether an export of this head is a whole target: engines draft with the layer of their target."""
    return head.kind == "mtp" and export_format != "native"


def native_files(head: DraftHead, target: ServedTarget) -> Files:
    """Our own format, as training saves it."""
    return head_config(head), head.engine_tensors()


def engine_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that vLLM, SGLang and TensorRT-LLM read."""
    tensors = head.tensors_with_full_lm_heads() if isinstance(head, MedusaHead) else head.engine_tensors()
    return head_config(head), tensors


def gguf_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that llama.cpp's converter reads."""
    if head.kind != "eagle3":
        wrong = f"export.format: 'gguf' given for a head of kind {head.kind}"
        raise ValueError(f"{wrong}, EAGLE-3 is allowed: llama.cpp drafts with no other; vllm and native hold this head")
    return engine_files(head, target)


def speculators_files(head: DraftHead, target: ServedTarget) -> Files:
    """The files that speculators and vLLM load as one model, which names its target (their "verifier")."""
    if isinstance(head, BlockHead):
        return speculators_block_files(head, target)
    if not isinstance(head, Eagle3Head) or head.shape.hidden_size != head.target.hidden_size:
        wrong = f"export.format: 'speculators' given for a head of kind {head.kind} and width {head.feature_size}"
        allowed = f"only block heads and EAGLE-3 of the target's width, {head.target.hidden_size}, are allowed"
        raise ValueError(f"{wrong}; {allowed}; use export.format=vllm instead")
    config = speculators_config(head, target, "eagle3", "Eagle3DraftModel", EAGLE3_KEYS)
    if len(head.taps) != 3:
        config["transformer_layer_config"]["num_aux_hidden_states"] = len(head.taps)  # vLLM reads it in this section
    config |= {
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
    }
    tensors = {speculators_name(name): tensor for name, tensor in head.engine_tensors().items()}
    if not head.shape.own_embedding:
        tensors["embed_tokens.weight"] = head.embedding
    return config, tensors


def speculators_block_files(head: BlockHead, target: ServedTarget) -> Files:
    """The same for block heads, as speculators' dspark or dflash."""
    if any(reach.causal for reach in head.shape.reaches if reach.window is None):
        wrong = "export.format: 'speculators' given for a head that is causal within the block (head.causal)"
        raise ValueError(f"{wrong}; vllm and native are allowed for it: choose one of them")
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


def speculators_config(
    head: Eagle3Head | BlockHead, target: ServedTarget, algorithm: str, architecture: str, keys: tuple[str, ...]
) -> dict[str, Any]:
    """The keys that speculators' heads of all kinds have, and `keys` of our own config.json."""
    flat, layer = head_config(head), head.shape.to_config(head.target)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": target.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "transformers_version": version("transformers"),
        "dtype": flat["torch_dtype"],
        "tie_word_embeddings": False,
        **{key: flat[key] for key in keys},
        "target_hidden_size": None,
        "transformer_layer_config": {key: flat[key] for key in layer if key not in NOT_IN_LAYER},
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": target.architectures},
        },
        "headstart": flat["headstart"],
    }


EAGLE3_KEYS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BLOCK_KEYS = ("draft_vocab_size", "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
DSPARK_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head")
NOT_IN_LAYER = ("rope_theta", "rope_scaling")  # the older spelling of rope_parameters


def speculators_name(name: str) -> str:
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


FORMATS = {
    "native": Format(native_files, None),
    "vllm": Format(engine_files, "vllm"),
    "sglang": Format(engine_files, "sglang"),
    "tensorrt_llm": Format(engine_files, "tensorrt_llm"),
    "speculators": Format(speculators_files, "speculators"),
    "gguf": Format(gguf_files, "llama_cpp"),
}
