"""How a target decodes, found by trial: the passes of decoding must compute the same as its module's own forward.

Otherwise a forward that depends on more than tokens, positions and mask would silently change the text.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import Images
from headstart.inference.core.tree import Tree
from headstart.inference.kernels import Trace, kernels_on_gpu, own_layers_of
from headstart.inference.targets.architecture import cache_layout
from headstart.inference.targets.attention import FUSED, keep_own_attention, own_attention_of
from headstart.inference.targets.passes import DecodingMethod, Passes, relative_difference

TRIAL_TOKENS, FIRST_PART, BOTH_PARTS = 12, 5, 8  # of the trial, of the prompt's first part, and of both parts
EXACT_TOKENS = 64  # of a text whose bits are compared
# Relative difference of logits up to which it is rounding. In half precision, other experts may be chosen.
ROUNDING = {torch.float32: 0.01, torch.float64: 0.01}
ROUNDING_IN_HALF = 0.25
FUSED_ROUNDING = 0.05  # the same in half precision, of the same model by our kernels
Trial = tuple[str, Tensor, range]  # the input in words, the logits of one row [nodes, vocab], their indices in the text
ROWS = ("of one row", "of a shorter row beside it")
KNOWN_METHODS: dict[str, DecodingMethod] = {}  # by identity, so that a process tries each kind of model once


@torch.inference_mode()
def choose_method(passes: Passes) -> list[str]:
    """Set the first method whose passes agree with the model's own forward; returns why the earlier ones do not.

    Raises ValueError, naming the family and the differences, if no method does.
    """
    if passes.selects_logits:  # some models take the argument and ignore a list
        three = torch.zeros(1, 3, dtype=torch.long, device=passes.device)
        with suppress(Exception):  # a model that does not run at all is refused below, by name
            passes.selects_logits = passes.forward(three, logits_at=[0, 2]).logits.shape[1] == 2
    layout = cache_layout(passes.model, passes.config.num_layers)
    methods: list[DecodingMethod] = ["chains", "plain"] if layout.is_recurrent else ["trees", "chains"]
    methods = [*(() if layout.empty is None else methods), "own cache", "own cache, plain"]
    identity, failures = identity_of(passes), list[str]()
    known = KNOWN_METHODS.get(identity)
    for method in methods if known is None else [known]:
        is_own = method.startswith("own cache")
        passes.method, passes.layout = method, layout.without_slots() if is_own else layout
        if is_own or layout.has_indexers:  # models of these kinds ask for their attention by name
            keep_own_attention(passes.model)
        failure = None if method == known else difference(passes)
        if failure is None:
            KNOWN_METHODS[identity] = method
            return failures
        failures.append(f"{method}: {failure}")
    raise ValueError(
        f"target.path: a {passes.config.model_type!r} model given, whose passes do not continue its own text: "
        f"{'; '.join(failures)}; a causal language model that computes the same in several passes as in one is "
        f"allowed: choose another target"
    )


def identity_of(passes: Passes) -> str:
    """A digest of everything that decides the method; the weights do not."""
    model = passes.model
    facts = type(model), model.config.to_json_string(), model.config._attn_implementation, passes.dtype, passes.device
    return hashlib.sha256(f"{facts} {transformers.__version__}".encode()).hexdigest()


def fuse_where_right(passes: Passes) -> tuple[set[str], dict[str, str]]:
    """On a GPU, let our kernels compute the small operations of a target's layers and its attention, kind by kind.

    Returns the kinds that they compute, and for others why the module's own code does: the passes differed, or the
    kernel failed on this device.
    """
    fused, left_out = set(), {}
    for kind, fuse in FUSED.items():
        before = {module: vars(module).get("forward") for module in passes.model.modules()}
        allowed = FUSED_ROUNDING if passes.dtype.itemsize < 4 else ROUNDING[passes.dtype]
        if not fuse(passes):
            continue
        if (failure := difference(passes, allowed)) is None:
            fused.add(kind)
            continue
        left_out[kind], passes.by_block = failure, False  # attention is the last kind
        for module, forward in before.items():
            vars(module).pop("forward", None)
            vars(module).update({} if forward is None else {"forward": forward})
    return fused, left_out


@torch.inference_mode()
def choose_where_faster(passes: Passes, trials: Any) -> tuple[Any, str]:
    """On a GPU, let our kernels choose tokens where `trials` find them faster; returns the lm_head that does, or None,
    and for how many forms or why for none. The model must return its lm_head's logits as they are: made-up ones are
    tried."""
    lm_head, vocab, failure = passes.model.get_output_embeddings(), passes.config.vocab_size, ""
    if type(lm_head) is not nn.Linear or lm_head.out_features != vocab or passes.dtype.itemsize > 4:
        return None, "none, as its lm_head is not a linear layer over its vocabulary in at most 32 bits"
    head = vars(lm_head)["forward"] = kernels_on_gpu("lm_head").ChoosingHead(lm_head)
    three = torch.zeros(1, 3, dtype=torch.long, device=passes.device)
    made_up = torch.linspace(-60, 60, 3 * vocab, device=passes.device).view(1, 3, vocab).to(passes.dtype)
    try:
        output, hidden = head.passing(partial(passes.forward, three), made_up)
        if hidden.shape[:2] != three.shape or not torch.equal(output.logits.float(), made_up.float()):
            failure = "the model changes the logits of its lm_head"
        elif head.choose_tiles(trials):
            return head, trials.line(len(head.tiles), "6 forms")
    except Exception as error:  # a model may raise anything
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        passes.hidden.clear()
    vars(lm_head)["forward"] = head.own
    return None, f"none, as {failure}" if failure else trials.line(0, "6 forms")


def difference(passes: Passes, rounding: float | None = None) -> str | None:
    """The first pass of the method whose logits differ from the model's own forward, and by how much; None if none.

    `rounding` is the relative difference that is none.
    """
    allowed = ROUNDING.get(passes.dtype, ROUNDING_IN_HALF) if rounding is None else rounding
    tokens = (torch.arange(TRIAL_TOKENS, device=passes.device).unsqueeze(0) * 7 + 5) % passes.config.vocab_size
    try:
        with own_attention_of(passes.model), own_layers_of(passes.model):
            all_logits = passes.forward(tokens).logits[0].float()
        for name, logits, index in TRIALS[passes.method](passes, tokens):
            wanted = all_logits[index.start : index.stop]
            if logits.shape != wanted.shape:
                return f"{name} gives logits of shape {tuple(logits.shape)} where {tuple(wanted.shape)} are due"
            if not (relative := relative_difference(logits, wanted)) <= allowed:
                largest = float((logits.float() - wanted).abs().max())
                return (
                    f"{name} differs from its own forward by up to {largest:.2g} in the logits ({relative:.1%} of them)"
                )
    except Exception as error:  # a model may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        passes.hidden.clear()
    return None


@torch.inference_mode()
def difference_in_bits(passes: Passes) -> str | None:
    """The first operation that gives a token other bits in a pass of the method than when decoding plainly, and by how
    much; None if every token has the same bits in every pass."""
    tokens = (torch.arange(EXACT_TOKENS, device=passes.device).unsqueeze(0) * 7 + 5) % passes.config.vocab_size
    text = tokens[0].tolist()
    try:
        with Trace(passes.model, text).running() as plain:
            wanted = torch.cat([*one_by_one(passes, tokens)])
        with Trace(passes.model, text, plain).running() as found:
            for trials in (prompt_at_once(passes, tokens), TRIALS[passes.method](passes, tokens[:, :TRIAL_TOKENS])):
                for name, logits, index in trials:
                    for first in found.differences[:1]:
                        return f"{first.operation} ({first.path}), in {name}, by up to {first.largest:.2g}"
                    largest = (logits - wanted[index.start : index.stop]).abs().max()
                    if largest != 0:
                        return f"the logits, in {name}, by up to {float(largest):.2g}"
    finally:
        passes.hidden.clear()
    return None


@torch.inference_mode()
def difference_with_images(passes: Passes, prompt: list[int], images: Images) -> str | None:
    """How the passes over a prompt with images, and over what follows, differ from the model's own forward; None if
    they do not."""
    device = passes.device
    more = (torch.arange(TRIAL_TOKENS, device=device).unsqueeze(0) * 7 + 5) % passes.config.vocab_size
    tokens = torch.cat([torch.tensor([prompt], device=device), more], dim=1)
    try:
        with own_attention_of(passes.model):
            whole = images.over_text(tokens[0].tolist())
            wanted = passes.forward(tokens, images=whole).logits[0]
        cache = passes.new_cache(tokens.shape[1] + TRIAL_TOKENS, batch=2)
        row, rest = cache.row(1), whole.inputs.get("input_ids", tokens)[:, images.end :].to(device)
        computed = [passes.read_images(tokens[:, : images.end], images, row, None).logits[0]]
        computed.append(passes.prefill(rest, row, images.end, None).logits[0])
        relative = relative_difference(torch.cat(computed), wanted)
        if not relative <= ROUNDING.get(passes.dtype, ROUNDING_IN_HALF):
            return f"whose passes after images differ from its own forward by {relative:.1%} of the logits"
    except Exception as error:  # a model may raise anything
        return f"whose passes with images end in {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        passes.hidden.clear()
    return None


def one_by_one(passes: Passes, tokens: Tensor) -> Iterator[Tensor]:
    """The logits of each token of a text, in passes of one token."""
    cache = passes.new_cache(EXACT_TOKENS + 4)
    yield passes.prefill(tokens[:, :1], cache.row(0), 0, None).logits[0]
    cache.set_lengths([1])
    for token in tokens[:, 1:].split(1, dim=1):
        passes.prepare_step(cache, drafts=False)
        yield passes.tree(Tree.root_only(token), cache).logits[0]
        cache.keep([[0]], token.tolist())


def prompt_at_once(passes: Passes, tokens: Tensor) -> Iterator[Trial]:
    row = passes.new_cache(EXACT_TOKENS + 4).row(0)
    yield "a prompt", passes.prefill(tokens, row, 0, None).logits[0], range(EXACT_TOKENS)


def try_prompt(passes: Passes, tokens: Tensor, cache: KVCache) -> Iterator[Trial]:
    """A prompt in two parts, and a shorter row that holds only the first part."""
    for row in range(2):
        logits = passes.prefill(tokens[:, :FIRST_PART], cache.row(row), 0, None).logits[0]
        yield "the first part of a prompt", logits, range(FIRST_PART)
    logits = passes.prefill(tokens[:, FIRST_PART:BOTH_PARTS], cache.row(0), FIRST_PART, None).logits[0]
    yield "the second part of a prompt", logits, range(FIRST_PART, BOTH_PARTS)
    cache.set_lengths([BOTH_PARTS, FIRST_PART])


def try_slots(passes: Passes, tokens: Tensor, tree: bool) -> Iterator[Trial]:
    """`try_prompt`, then a token and trees or chains of both rows."""
    cache = passes.new_cache(TRIAL_TOKENS + 4, batch=2)
    yield from try_prompt(passes, tokens, cache)
    rest = rest_by_row(tokens)
    logits = passes.tree(chain_of(rest[:, :1]), cache).logits
    yield from by_row("one token", logits, 0)
    right = slice(None)
    if tree:  # a wrong token before each right one but the root
        wrong = (rest[:, 1:] + 1) % passes.config.vocab_size
        together = torch.stack([wrong, rest[:, 1:]], dim=2).flatten(1)
        above = torch.arange(rest.shape[1] - 1, device=tokens.device).repeat_interleave(2) * 2
        parents = torch.cat([above[:1] - 1, above]).expand(2, -1)
        drafts = Tree(torch.cat([rest[:, :1], together], dim=1), parents)
        right = slice(None, None, 2)
    else:
        drafts = chain_of(rest)
    yield from by_row("a tree" if tree else "a chain", passes.tree(drafts, cache).logits[:, right], 0)


def try_states(passes: Passes, tokens: Tensor) -> Iterator[Trial]:
    """`try_prompt`, a token of both rows, chains whose drafts are wrong, and chains after their roots, which are read
    again."""
    cache = passes.new_cache(TRIAL_TOKENS + 4, batch=2)
    yield from try_prompt(passes, tokens, cache)
    one, root, rest = rest_by_row(tokens).split((1, 1, TRIAL_TOKENS - BOTH_PARTS - 2), dim=1)
    yield from by_row("one token", passes.tree(chain_of(one), cache).logits, 0)
    cache.keep([[0], [0]], one.tolist())
    passes.tree(chain_of(root.expand(2, 3)), cache)
    cache.keep([[0], [0]], root.tolist())
    yield from by_row("a chain after a rejected one", passes.tree(chain_of(rest), cache).logits, 2)


def try_plain(passes: Passes, tokens: Tensor) -> Iterator[Trial]:
    """Two prompts of unequal length, each in one pass, and then token by token."""
    cache = passes.new_cache(TRIAL_TOKENS + 4, batch=2)
    for row, end in enumerate((BOTH_PARTS, FIRST_PART)):
        yield "a prompt", passes.prefill(tokens[:, :end], cache.row(row), 0, None).logits[0], range(end)
    cache.set_lengths([BOTH_PARTS, FIRST_PART])
    for step, token in enumerate(rest_by_row(tokens).T[:2]):
        logits = passes.tree(Tree.root_only(token[:, None]), cache).logits
        cache.keep([[0], [0]], token[:, None].tolist())
        yield from by_row("one token", logits, step)


def by_row(name: str, logits: Tensor, after: int) -> Iterator[Trial]:
    """A pass of both rows, starting `after` tokens past their cached part."""
    for row, of_row, start in zip(ROWS, logits, (BOTH_PARTS, FIRST_PART), strict=True):
        yield f"{name} {row}", of_row, range(start + after, start + after + len(of_row))


def rest_by_row(tokens: Tensor) -> Tensor:
    """The next tokens after both parts of the prompt, and the same number of tokens after its first part."""
    count = TRIAL_TOKENS - BOTH_PARTS
    return torch.cat([tokens[:, BOTH_PARTS:], tokens[:, FIRST_PART : FIRST_PART + count]])


def chain_of(tokens: Tensor) -> Tree:
    return Tree(tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) - 1)


TRIALS: dict[DecodingMethod, Callable[[Passes, Tensor], Iterator[Trial]]] = {
    "trees": lambda passes, tokens: try_slots(passes, tokens, tree=True),
    "chains": lambda passes, tokens: (
        try_states(passes, tokens) if passes.layout.is_recurrent else try_slots(passes, tokens, tree=False)
    ),
    "plain": try_plain,
    "own cache": try_states,
    "own cache, plain": try_plain,
}
