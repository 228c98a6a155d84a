"""What the files of all heads in the layout of the speculators library have in common."""

from importlib.metadata import version
from typing import Any

from headstart.heads.base import DraftHead
from headstart.heads.formats.subject import ServedTarget
from headstart.heads.kinds.checkpoint import head_config

SPECULATORS_VERSION = "0.9.0"  # the version whose layout is written
NOT_IN_LAYER = ("rope_theta", "rope_scaling")  # the older spelling of rope_parameters


def speculators_config(
    head: DraftHead, target: ServedTarget, algorithm: str, architecture: str, keys: tuple[str, ...]
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


def not_in_speculators(head: DraftHead) -> ValueError:
    """The error for a head that the layout cannot hold."""
    given = f"export.format: 'speculators' given for a head of kind {head.kind} and width {head.feature_size}"
    allowed = f"only block heads and EAGLE-3 of the target's width, {head.target.hidden_size}, are allowed"
    return ValueError(f"{given}; {allowed}; use export.format=vllm instead")
