"""Sizes in a recipe that do not fit the target, known from the target's config.json before anything is computed."""

from collections.abc import Iterator
from typing import Any, TypeGuard

from headstart.recipes.schema import DataSection, DecodeSection

RecipeMistake = tuple[str, str]  # section.key, and "WHAT IS ALLOWED; what to do"
RANKED_GROWTHS = ("dynamic", "cost_aware")  # they expand a node by its decode.width likeliest children


def size_mistakes(config: dict[str, Any], recipe: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Yield every size that does not fit a target with this config.json; both are untyped, as read from their files."""
    sizes = dict_or_empty(config.get("text_config")) or config  # multimodal models keep the decoder's sizes there
    head, data, decode = (dict_or_empty(recipe.get(section)) for section in ("head", "data", "decode"))
    vocab_size = sizes.get("vocab_size")
    if is_count(layers := first(sizes, "num_hidden_layers", "n_layer")):
        yield from layer_mistakes(layers, head, decode)
    if is_count(vocab_size):
        yield from vocabulary_mistakes(vocab_size, head, decode)
    if is_count(positions := first(sizes, "max_position_embeddings", "n_positions")):
        yield from length_mistakes(positions, data, decode)
    yield from head_count_mistakes(first(sizes, "num_attention_heads", "n_head"), head)


def layer_mistakes(layers: int, head: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    taps, exit_layers = head.get("taps"), decode.get("exit_layers")
    if isinstance(taps, list) and (beyond := [tap for tap in taps if is_count(tap) and tap > layers]):
        allowed = f"hidden states 0 to {layers} of a target with {layers} layers are allowed"
        yield "head.taps", f"{allowed}; replace {', '.join(map(str, beyond))}"
    if is_count(exit_layers) and exit_layers >= layers:
        yield (
            "decode.exit_layers",
            f"1 to {layers - 1} is allowed, fewer than the target's {layers} layers; lower it, or null for half",
        )


def vocabulary_mistakes(vocab_size: int, head: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    """A head cannot draft more tokens than the target has, nor more children than it drafts tokens."""
    draft_vocab_size, width = head.get("draft_vocab_size"), decode.get("width")
    if is_count(draft_vocab_size) and draft_vocab_size > vocab_size:
        yield (
            "head.draft_vocab_size",
            f"1 to the target's {vocab_size} tokens are allowed; lower it, or null for all of them",
        )
    mask_token_id = head.get("mask_token_id")
    if isinstance(mask_token_id, int) and mask_token_id >= vocab_size:
        yield (
            "head.mask_token_id",
            f"0 to {vocab_size - 1} of the target's tokens is allowed; choose one that it never writes, or null for "
            "its last",
        )
    drafted, whose = vocab_size, "the target has tokens"
    if is_count(draft_vocab_size) and decode.get("drafter", "head") == "head":
        drafted, whose = min(draft_vocab_size, vocab_size), "the head drafts tokens (head.draft_vocab_size)"
    growth = decode.get("growth", DecodeSection.model_fields["growth"].default)
    if growth in RANKED_GROWTHS and is_count(width) and width > drafted:
        yield "decode.width", f"1 to {drafted} is allowed, as many as {whose}; lower it"


def length_mistakes(positions: int, data: dict[str, Any], decode: dict[str, Any]) -> Iterator[RecipeMistake]:
    """Neither a sample nor a decoded text may be longer than the target's positions."""
    fields = DataSection.model_fields
    prompt = data.get("prompt_tokens", fields["prompt_tokens"].default)
    response = data.get("response_tokens", fields["response_tokens"].default)
    if is_count(prompt) and is_count(response) and prompt + response > positions:
        field, other = ("prompt_tokens", response) if prompt >= positions else ("response_tokens", prompt)
        most = f"up to {positions - other}" if other < positions else f"fewer than {positions}"
        yield (
            f"data.{field}",
            f"{most} is allowed, because data.prompt_tokens {prompt} and data.response_tokens {response} make samples "
            f"of {prompt + response} tokens and the target has {positions} positions; lower one of them",
        )
    new_tokens = decode.get("max_new_tokens")
    if is_count(new_tokens) and new_tokens >= positions:
        yield (
            "decode.max_new_tokens",
            f"1 to {positions - 1} is allowed, fewer than the target's {positions} positions; lower it",
        )


def head_count_mistakes(target_heads: object, head: dict[str, Any]) -> Iterator[RecipeMistake]:
    """The head's key and value heads must divide its attention heads, which may be the target's."""
    num_kv_heads = head.get("num_kv_heads")
    if head.get("num_heads") is not None or not is_count(num_kv_heads) or not is_count(target_heads):
        return
    if target_heads % num_kv_heads:
        yield (
            "head.num_kv_heads",
            f"a divisor of the target's {target_heads} attention heads is allowed; change it, or set head.num_heads",
        )


def first(sizes: dict[str, Any], *names: str) -> Any:
    """The first of these keys that is given."""
    return next((sizes[name] for name in names if sizes.get(name) is not None), None)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number above 0; the schema has reported it if it is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def dict_or_empty(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
