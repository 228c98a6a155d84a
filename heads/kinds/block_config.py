"""The shape of a block head, and its config.json in DFlash's spelling, DSpark's and speculators'.

`target_layer_ids` count the outputs of layers, one less than the hidden_states that ours and speculators' ids count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.heads.kinds.block_attention import Reach
from headstart.heads.layers import LayerShape
from headstart.heads.target_config import TargetConfig

NESTED = "dflash_config"
LAYER_OUTPUTS, HIDDEN_STATES = "target_layer_ids", "aux_hidden_state_layer_ids"
NEEDED = {  # key -> what engines take without it
    "block_size": "SGLang takes 16, speculators 8, vLLM as many slots as it is asked for",
    "mask_token_id": "SGLang takes the token <|MASK|>",
    "sample_from_anchor": "vLLM takes false in speculators' layout, true for DSpark in its own",
    "num_hidden_layers": "transformers takes 32",
}


@dataclass(frozen=True)
class BlockShape(LayerShape):
    """Everything about a block head that is not a weight."""

    taps: tuple[int, ...]
    reaches: tuple[Reach, ...]  # one for each layer
    block_size: int  # slots of a block
    mask_token_id: int  # the token whose embedding fills all slots but the first
    sample_from_anchor: bool = True  # slot k predicts the token after slot k; false: slot k > 0 predicts its own token
    markov_rank: int = 0  # 0: no Markov head
    markov_gate: bool = False  # only published heads have it
    own_lm_head: bool = False  # a trained one; only published heads have it

    @property
    def num_layers(self) -> int:
        return len(self.reaches)

    @property
    def causal(self) -> bool:
        """The field of the recipe's section."""
        return all(reach.causal for reach in self.reaches)

    @property
    def levels(self) -> int:
        """The number of levels that one pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def method(self) -> str:
        """The engines' name for this way of drafting."""
        return "dspark" if self.sample_from_anchor or self.markov_rank > 0 else "dflash"

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_kv_heads, self.head_dim


def block_config(shape: BlockShape, target: TargetConfig, draft_vocab_size: int) -> dict[str, Any]:
    """config.json as engines read it, in both spellings; only `is_causal` keeps its default where that is right."""
    windows = {reach.window for reach in shape.reaches} - {None}
    assert len(windows) <= 1, "config.json has one window for all sliding layers"
    window = next(iter(windows), None)
    layer_ids = [tap - 1 for tap in shape.taps]
    causal = causality(shape.reaches)
    return {
        **shape.to_config(target),
        "architectures": ["Qwen3DSparkModel" if shape.method == "dspark" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention" if r.window is None else "sliding_attention" for r in shape.reaches],
        "sliding_window": window,
        # Without sliding layers it is true, since vLLM applies it to every layer of a head in speculators' layout.
        "sliding_window_non_causal": not any(reach.causal for reach in shape.reaches if reach.window is not None),
        **({} if causal is None else {"is_causal": causal}),
        "draft_vocab_size": draft_vocab_size,
        "block_size": shape.block_size,
        "target_layer_ids": layer_ids,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": shape.sample_from_anchor,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "gated" if shape.markov_gate else "vanilla",
        "enable_confidence_head": False,
        NESTED: {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": layer_ids,
            "sample_from_anchor": shape.sample_from_anchor,
            **({} if causal is None else {"causal": causal}),
            "use_swa": all(reach.window is not None for reach in shape.reaches),
            "swa_window_size": window,
        },
    }


def causality(reaches: Sequence[Reach]) -> bool | None:
    """`is_causal`, by which engines make all layers causal within the block, or none.

    None for the one mixture that engines serve, without the key: causal with a window, not causal without one.
    """
    whole, sliding = (
        {reach.causal for reach in reaches if (reach.window is None) == is_whole} for is_whole in (True, False)
    )
    return None if (whole, sliding) == ({False}, {True}) else all(whole or sliding)


def is_block_config(config: dict[str, Any]) -> bool:
    """Whether a config.json, ours or published, describes a block head."""
    names = [*(config.get("architectures") or []), str(config.get("speculators_model_type"))]
    return NESTED in config or any(part in name.lower() for name in names for part in ("dflash", "dspark"))


def block_key(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """The value of a key at the top level or, as DFlash's files have it, in a section of its own."""
    found = config.get(key)
    if found is None:
        found = (config.get(NESTED) or {}).get(key)
    return default if found is None else found


def block_taps(config: dict[str, Any]) -> tuple[int, ...]:
    """The hidden_states that the head reads; raises ValueError if config.json does not name them."""
    outputs = block_key(config, LAYER_OUTPUTS, [])
    own, counted = config.get("headstart", {}).get("taps"), [layer + 1 for layer in outputs]
    if not (taps := tuple(own or counted or config.get(HIDDEN_STATES) or ())):
        takes = "vLLM would take hidden_states 2, L/2 and L-3 of L layers, SGLang as many as the head has layers"
        raise ValueError(f"config.json lacks {LAYER_OUTPUTS}; {takes}: add the ids that the head was trained with")
    return taps


def slot_misfits(config: dict[str, Any], target: TargetConfig) -> Iterator[tuple[str, Any, str]]:
    """Each key that a head cannot have with its value, the value, and what is allowed; a missing one costs acceptance.

    Our own files note the slots that a head was trained with apart from those that engines read.
    """
    for key, default in NEEDED.items():
        if block_key(config, key) is None:
            yield key, None, f"the one that the head was trained with is required: without the key {default}"
    size, token = block_key(config, "block_size"), block_key(config, "mask_token_id")
    trained = config.get("headstart", {}).get("block_size") or size
    if size is not None and not 2 <= size <= trained:
        yield "block_size", size, f"2 to the {trained} slots that the head was trained with is allowed"
    if token is not None and not 0 <= token < target.vocab_size:
        yield "mask_token_id", token, f"0 to the target's {target.vocab_size - 1} is allowed, a row of its embedding"


def block_shape(config: dict[str, Any], target: TargetConfig, own_lm_head: bool) -> BlockShape:
    """The shape that a config.json describes; raises ValueError that names what is missing or cannot be represented."""
    wrong = [f"{key}: {value} given, {allowed}" for key, value, allowed in slot_misfits(config, target)]
    if wrong := [*wrong, *other_computations(config, target)]:
        raise ValueError(f"config.json: {'; '.join(wrong)}; correct it, or choose another head")
    rank = block_key(config, "markov_rank", 0)
    return BlockShape.from_config(
        config,
        target,
        taps=block_taps(config),
        reaches=tuple(layer_reaches(config)),
        block_size=block_key(config, "block_size"),
        mask_token_id=block_key(config, "mask_token_id"),
        sample_from_anchor=block_key(config, "sample_from_anchor"),
        markov_rank=rank,
        markov_gate=rank > 0 and block_key(config, "markov_head_type") == "gated",
        own_lm_head=own_lm_head,
    )


def other_computations(config: dict[str, Any], target: TargetConfig) -> Iterator[str]:
    """The keys by which a config.json asks for a computation that our block heads lack, each with what is allowed."""
    allowed = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "markov_head_type": ("vanilla", "gated"),
        "projector_type": ("dflash", "dspark"),
        "conv_kernel_size": (0,),
        "selector_rank": (0,),
        "input_embedding_scale": (1,),
        "output_multiplier": (1,),
        "final_logit_softcapping": (target.final_logit_softcap,),
    }
    for key, values in allowed.items():
        if (found := block_key(config, key)) is not None and found not in values:
            yield f"{key} {found!r}: only {' and '.join(map(repr, values))} is allowed"


def layer_reaches(config: dict[str, Any]) -> Iterator[Reach]:
    """The reach of each layer. As in engines, sliding layers are causal within the block unless a key forbids it."""
    types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    if block_key(config, "use_swa"):
        types = ["sliding_attention"] * config["num_hidden_layers"]
    window = block_key(config, "swa_window_size", config.get("sliding_window"))
    causal = block_key(config, "causal", config.get("is_causal"))
    non_causal = config.get("sliding_window_non_causal")
    sliding_causal = (True if causal is None else bool(causal)) if non_causal is None else not non_causal
    if "sliding_attention" in types and window is None:
        raise ValueError("config.json lacks sliding_window, the positions that sliding_attention layers see; add it")
    if len(types) != config["num_hidden_layers"]:
        allowed = f"{config['num_hidden_layers']} is allowed, one for each of num_hidden_layers"
        raise ValueError(f"layer_types: {len(types)} given, {allowed}; correct config.json")
    for kind in types:
        yield Reach(window, sliding_causal) if kind == "sliding_attention" else Reach(None, bool(causal))
