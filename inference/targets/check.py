"""How a target decodes, found by trial: the passes of decoding must compute what its module's own forward computes.

A forward that depends on more than tokens, positions and mask would otherwise write another text in silence.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
import transformers
from torch import Tensor

from headstart.common.files import write_text
from headstart.common.process import user_cache
from headstart.inference.core.tree import Tree
from headstart.inference.targets.attention import keep_own_attention, own_attention_of
from headstart.inference.targets.cache_layout import cache_layout
from headstart.inference.targets.forward import Passes, Way

COUNT, FIRST, SECOND = 12, 5, 8  # tokens of the trial; those of the prompt's first part, and of both parts
# Difference of logits, relative to them, that is still rounding. In half precision, experts are chosen differently.
ROUNDING = {torch.float32: 0.01, torch.float64: 0.01}
ROUNDING_IN_HALF = 0.25
Pass = tuple[str, Tensor, range]  # what it reads, the logits of one row [nodes, vocab], and their places in the text
ROWS = ("of one row", "of a shorter row beside it")
FOUND: dict[str, Way] = {}  # by what decides it, so that a process tries each kind of model once
SLOW = 5 * 10**8  # weights; what was found for a larger model is kept for later processes


@torch.inference_mode()
def choose_way(target: Passes) -> list[str]:
    """Set how the target decodes: the first way whose passes agree with its own forward; returns why not the others.

    Raises ValueError, naming the family and the differences, if none does.
    """
    if target.selects_logits:  # some models take the argument and ignore a list
        three = torch.zeros(1, 3, dtype=torch.long, device=target.device)
        target.selects_logits = target.forward(three, logits_at=[0, 2]).logits.shape[1] == 2
    layout = cache_layout(target.model, target.config.num_layers)
    known: list[Way] = [] if layout.empty is None else ["chains", "plain"] if layout.has_states else ["trees", "chains"]
    identity, failures = identity_of(target), list[str]()
    found = known_way(identity)
    ways: list[Way] = [*known, "own cache", "own cache, plain"] if found is None else [found]
    for way in ways:
        is_own = way.startswith("own cache")
        target.way, target.layout = way, layout.without_slots() if is_own else layout
        if is_own or layout.has_indexers:  # models of these kinds ask for their attention by name
            keep_own_attention(target.model)
        failure = None if way == found else difference(target, PASSES[way])
        if failure is None:
            keep_way(identity, way, target)
            return failures
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
                FOUND[identity] = way
    return FOUND.get(identity)


def keep_way(identity: str, way: Way, target: Passes) -> None:
    """Keep a way for this process; for later ones too, if the model is large and its code is that of transformers."""
    if identity in FOUND:
        return
    FOUND[identity] = way
    is_slow = sum(parameter.numel() for parameter in target.model.parameters()) > SLOW
    if is_slow and type(target.model).__module__.startswith("transformers."):
        with suppress(OSError, RuntimeError):
            write_text(user_cache("checked_targets") / identity, way)


def difference(target: Passes, passes: Callable[[Passes, Tensor], Iterator[Pass]]) -> str | None:
    """The first of these passes whose logits differ from the module's own forward, and by how much; None if none."""
    size = target.config.vocab_size
    tokens = (torch.arange(COUNT, device=target.device).unsqueeze(0) * 7 + 5) % size
    try:
        with own_attention_of(target.model):
            wanted = target.forward(tokens).logits[0].float()
        for name, logits, places in passes(target, tokens):
            found, own = logits.float(), wanted[places.start : places.stop]
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


def slot_passes(target: Passes, tokens: Tensor, tree: bool) -> Iterator[Pass]:
    """A prompt in two parts, then a token and trees or chains of two rows, one of which holds the first part alone."""
    cache = target.new_cache(COUNT + 4, batch=2)
    row = cache.row(0)
    row.set_lengths([0])
    yield "the first part of a prompt", target.forward(tokens[:, :FIRST], cache=row).logits[0], range(FIRST)
    cache.target.move(0, 1, FIRST)
    row.set_lengths([FIRST])
    logits = target.forward_tree(chain_of(tokens[:, FIRST:SECOND]), row).logits[0]
    yield "the second part of a prompt", logits, range(FIRST, SECOND)
    cache.set_lengths([SECOND, FIRST])
    whole = both_rows(tokens)
    logits = target.forward_tree(chain_of(whole[:, :1]), cache).logits
    yield from by_row("one token", logits, 0)
    right = slice(None)
    if tree:  # a wrong token before each right one but the root
        wrong = (whole[:, 1:] + 1) % target.config.vocab_size
        together = torch.stack([wrong, whole[:, 1:]], dim=2).flatten(1)
        above = torch.arange(whole.shape[1] - 1, device=tokens.device).repeat_interleave(2) * 2
        parents = torch.cat([above[:1] - 1, above]).expand(2, -1)
        drafts = Tree(torch.cat([whole[:, :1], together], dim=1), parents)
        right = slice(None, None, 2)
    else:
        drafts = chain_of(whole)
    yield from by_row("a tree" if tree else "a chain", target.forward_tree(drafts, cache).logits[:, right], 0)


def state_passes(target: Passes, tokens: Tensor) -> Iterator[Pass]:
    """A prompt in two parts, a token of two rows, chains whose drafts are wrong, and chains after their roots, which
    are read again. One row holds the first part alone."""
    cache = target.new_cache(COUNT + 4, batch=2)
    for row in range(2):
        logits = target.read_on(tokens[:, :FIRST], cache.row(row), 0, None).logits[0]
        yield "the first part of a prompt", logits, range(FIRST)
    logits = target.read_on(tokens[:, FIRST:SECOND], cache.row(0), FIRST, None).logits[0]
    yield "the second part of a prompt", logits, range(FIRST, SECOND)
    cache.set_lengths([SECOND, FIRST])
    one, root, rest = both_rows(tokens).split((1, 1, COUNT - SECOND - 2), dim=1)
    yield from by_row("one token", target.forward_tree(chain_of(one), cache).logits, 0)
    cache.keep([[0], [0]], one.tolist())
    target.forward_tree(chain_of(root.expand(2, 3)), cache)
    cache.keep([[0], [0]], root.tolist())
    yield from by_row("a chain after a rejected one", target.forward_tree(chain_of(rest), cache).logits, 2)


def plain_passes(target: Passes, tokens: Tensor) -> Iterator[Pass]:
    """Two prompts of unequal length, each in one pass, and then token by token."""
    cache = target.new_cache(COUNT + 4, batch=2)
    for row, end in enumerate((SECOND, FIRST)):
        yield "a prompt", target.read_on(tokens[:, :end], cache.row(row), 0, None).logits[0], range(end)
    cache.set_lengths([SECOND, FIRST])
    for step, token in enumerate(both_rows(tokens).T[:2]):
        logits = target.forward_tree(Tree.root_only(token[:, None]), cache).logits
        cache.keep([[0], [0]], token[:, None].tolist())
        yield from by_row("one token", logits, step)


def by_row(what: str, logits: Tensor, after: int) -> Iterator[Pass]:
    """A pass of both rows, `after` so many tokens after the parts that they hold."""
    for name, found, start in zip(ROWS, logits, (SECOND, FIRST), strict=True):
        yield f"{what} {name}", found, range(start + after, start + after + len(found))


def both_rows(tokens: Tensor) -> Tensor:
    """Equally many tokens after both parts of the prompt, and after the first part."""
    count = COUNT - SECOND
    return torch.cat([tokens[:, SECOND:], tokens[:, FIRST : FIRST + count]])


def chain_of(tokens: Tensor) -> Tree:
    return Tree(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) - 1)


PASSES: dict[Way, Callable[[Passes, Tensor], Iterator[Pass]]] = {
    "trees": lambda target, tokens: slot_passes(target, tokens, tree=True),
    "chains": lambda target, tokens: (
        state_passes(target, tokens) if target.layout.has_states else slot_passes(target, tokens, tree=False)
    ),
    "plain": plain_passes,
    "own cache": state_passes,
    "own cache, plain": plain_passes,
}
