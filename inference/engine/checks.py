"""Limits of a request, checked before any work is done."""

from headstart.inference.core.request import Request
from headstart.inference.core.sampling import check_bias
from headstart.inference.targets.model import TargetModel


def check_request(target: TargetModel, request: Request) -> None:
    """Raise ValueError for a request that does not fit the target's positions or vocabulary."""
    check_length(target, request.prompt, request.max_new_tokens)
    check_vocabulary(target, request.prompt)
    if request.constraint is not None and request.sampling.rule != "seeded":
        raise ValueError(
            f"decode.acceptance: {request.sampling.rule} given, only seeded is allowed for a request with a "
            f"constraint; leave one of the two out"
        )
    check_bias(request.sampling.logit_bias, target.config.vocab_size)


def check_length(
    target: TargetModel, prompt: list[int], max_new_tokens: int, field: str = "decode.max_new_tokens"
) -> None:
    """Raise ValueError, before any work is done, for a request that does not fit the target's positions.

    `field` is where the user said how many new tokens to write.
    """
    limit = target.max_positions
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"{field}: {max_new_tokens} given, 1 or more is allowed; raise it")
    if len(prompt) + max_new_tokens > limit:
        raise ValueError(
            f"{field}: a prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the target's "
            f"{limit} positions; up to {max(limit - len(prompt), 0)} new tokens are allowed after this prompt: lower "
            f"{field}, or shorten the prompt to {max(limit - max_new_tokens, 0)} tokens"
        )


def check_vocabulary(target: TargetModel, prompt: list[int]) -> None:
    """Raise ValueError for a prompt in tokens that the target does not have."""
    size = target.config.vocab_size
    if outside := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]:
        raise ValueError(
            f"a prompt holds token id {outside[0]}, 0 to {size - 1} of the target is allowed; encode it with the "
            f"target's own tokenizer (the one in the target's folder may be another model's)"
        )
