"""How a target decodes, found by trial: the passes of decoding must compute what its module's own forward computes.

A forward that depends on more than tokens, positions and mask would otherwise write another text in silence.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, cast

import torch
import transformers
from torch import Tensor

from headstart.common.files import write_text
from headstart.common.process import user_cache
from headstart.inference.core.tree import Tree
from headstart.inference.passes.cache_layout import cache_layout
from headstart.inference.passes.forward import Passes

COUNT, FIRST, SECOND = 12, 5, 8  # tokens of the trial; those of the prompt's first part, and of both parts
# Difference of logits, relative to them, that is still rounding. In half precision, experts are chosen differently.
ROUNDING = {torch.float32: 0.01, torch.float64: 0.01}
ROUNDING_IN_HALF = 0.25
Way = Literal["trees", "chains", "own cache"]
FOUND: dict[str, Way] = {}  # by what decides it, so that a process tries each kind of model once
SLOW = 5 * 10**8  # weights; what was found for a larger model is kept for later processes


@torch.inference_mode()
def choose_way(target: Passes) -> None:
    """Set how the target decodes: the first way whose passes agree with its own forward.

    Raises ValueError, naming the family and the differences, if none does.
    """
    layout = cache_layout(target.model, target.config.num_layers)
    known: list[Way] = [] if layout.empty is None else ["chains"] if layout.has_states else ["trees", "chains"]
    identity, failures = identity_of(target), list[str]()
    found = known_way(identity)
    ways: list[Way] = [*known, "own cache"] if found is None else [found]
    for way in ways:
        target.drafts, target.layout = way, layout if way != "own cache" else layout.without_slots()
        failure = None if way == found else difference(target, PASSES[way])
        if failure is None:
            keep_way(identity, way, target)
            return
        failures.append(f"{way}: {failure}")
    raise ValueError(
        f"target.path: a {target.config.model_type!r} model given, whose passes do not continue its own text: "
        f"{'; '.join(failures)}; a causal language model that computes the same in several passes as in one is "
        f"allowed: choose another target"
    )


def identity_of(target: Passes) -> str:
    """A digest of what decides how a target decodes; its weights do not."""
    model = target.model
    facts = type(model), model.config.to_json_string(), model.config._attn_implementation, target.dtype, target.device
    return hashlib.sha256(f"{facts} {transformers.__version__}".encode()).hexdigest()


def known_way(identity: str) -> Way | None:
    """The way that this process, or an earlier one, has found for a kind of model."""
    if identity not in FOUND and not torch.distributed.is_initialized():  # ranks must agree on whether they try
        with suppress(OSError, RuntimeError):  # there may be no file, or no home folder
            way = (user_cache("checked_targets") / identity).read_text()
            if way in PASSES:
                FOUND[identity] = cast(Way, way)
    return FOUND.get(identity)


def keep_way(identity: str, way: Way, target: Passes) -> None:
    """Keep a way for this process; for later ones too, if the model is large and its code is that of transformers."""
    is_slow = sum(parameter.numel() for parameter in target.model.parameters()) > SLOW
    if identity not in FOUND and is_slow and type(target.model).__module__.startswith("transformers."):
        with suppress(OSError, RuntimeError):
            write_text(user_cache("checked_targets") / identity, way)
    FOUND[identity] = way


def difference(target: Passes, passes: Callable[[Passes, Tensor], list[tuple[str, Tensor, range]]]) -> str | None:
    """The first of these passes whose logits differ from the module's own forward, and by how much; None if none."""
    size = target.config.vocab_size
    tokens = (torch.arange(COUNT, device=target.device).unsqueeze(0) * 7 + 5) % size
    try:
        wanted = target.forward(tokens).logits[0].float()
        for name, logits, places in passes(target, tokens):
            found, own = logits[0].float(), wanted[places.start : places.stop]
            if found.shape != own.shape:
                return f"{name} gives logits of shape {tuple(found.shape)} where {tuple(own.shape)} are due"
            apart = float((found - own).norm() / own.norm().clamp(min=1e-6))
            if not apart <= ROUNDING.get(target.dtype, ROUNDING_IN_HALF):
                most = float((found - own).abs().max())
                return f"{name} differs from its own forward by up to {most:.2g} in the logits ({apart:.1%} of them)"
    except Exception as error:  # whatever a model raises when it is run so
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        target._seen.clear()
    return None


def slot_passes(target: Passes, tokens: Tensor, tree: bool) -> list[tuple[str, Tensor, range]]:
    """A prompt in two parts, then a tree or a chain, in slots."""
    cache = target.new_cache(COUNT + 4)
    cache.set_lengths([0])
    first = target.forward(tokens[:, :FIRST], cache=cache).logits
    cache.set_lengths([FIRST])
    second = target.forward_tree(chain_of(tokens[:, FIRST:SECOND]), cache).logits
    cache.set_lengths([SECOND])
    whole = chain_of(tokens[:, SECOND:])
    nodes = slice(None)
    if tree:  # a wrong token before each right one but the root
        wrong = (tokens[:, SECOND + 1 :] + 1) % int(tokens.max() + 1)
        together = torch.stack([wrong, tokens[:, SECOND + 1 :]], dim=2).flatten(1)
        above = torch.arange(COUNT - SECOND - 1, device=tokens.device).repeat_interleave(2) * 2
        whole = Tree(
            torch.cat([tokens[:, SECOND : SECOND + 1], together], dim=1), torch.cat([above[:1] - 1, above])[None]
        )
        nodes = slice(None, None, 2)
    last = target.forward_tree(whole, cache).logits[:, nodes]
    return [
        ("the first part of a prompt", first, range(FIRST)),
        ("the second part of a prompt", second, range(FIRST, SECOND)),
        ("a tree" if tree else "a chain", last, range(SECOND, COUNT)),
    ]


def state_passes(target: Passes, tokens: Tensor) -> list[tuple[str, Tensor, range]]:
    """A prompt in two parts, a chain whose drafts are wrong, and a chain after its root, which is read again."""
    cache, found = target.new_cache(COUNT + 4), []
    for start, end, name in ((0, FIRST, "the first part of a prompt"), (FIRST, SECOND, "the second part of a prompt")):
        logits = target.read_on(tokens[:, start:end], cache.row(0), start, None).logits
        found.append((name, logits, range(start, end)))
    cache.set_lengths([SECOND])
    root, rest = tokens[:, SECOND : SECOND + 1], tokens[:, SECOND + 1 :]
    logits = target.forward_tree(chain_of(torch.cat([root, root.expand(1, 2)], dim=1)), cache).logits
    found.append(("a rejected chain", logits[:, :1], range(SECOND, SECOND + 1)))
    cache.keep([[0]], [root[0].tolist()])
    logits = target.forward_tree(chain_of(rest), cache).logits
    return [*found, ("a chain after a rejected one", logits, range(SECOND + 1, COUNT))]


def chain_of(tokens: Tensor) -> Tree:
    return Tree(tokens, torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0) - 1)


def passes_of_chains(target: Passes, tokens: Tensor) -> list[tuple[str, Tensor, range]]:
    return state_passes(target, tokens) if target.layout.has_states else slot_passes(target, tokens, tree=False)


PASSES: dict[Way, Callable[[Passes, Tensor], list[tuple[str, Tensor, range]]]] = {
    "trees": lambda target, tokens: slot_passes(target, tokens, tree=True),
    "chains": passes_of_chains,
    "own cache": state_passes,
}
