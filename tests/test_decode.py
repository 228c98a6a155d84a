"""THE law: a drafter changes how fast a text comes, never which text, token for token, at every temperature."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from heads.base import DraftHead
from heads.eagle3 import Eagle3Head
from heads.vocab import DraftVocab
from inference.cache import KVCache
from inference.decode import DecodeStats, Generation, generate, stream
from inference.drafters import Drafter, NoDrafter, Verified
from inference.drafters.head import Growth, HeadDrafter
from inference.sampling import Sampling, choice_scores
from inference.target import TargetModel
from inference.tree import Tree

PROMPT, NEW_TOKENS = [5, 6, 7, 11], 20
SAMPLINGS = [Sampling(), Sampling(0.7, 0), Sampling(0.7, 1), Sampling(1.0, 2)]
MakeHead = Callable[..., Eagle3Head]
MakeModel = Callable[..., LlamaForCausalLM]
all_samplings = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T={s.temperature} seed={s.seed}")


class Scripted:
    """A drafter that knows the text; what it makes of that is `tree`, given the tokens to come, behind the root."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = 32

    def __init__(self, text: list[int], depth: int = 5, seed: int = 0) -> None:
        self.text, self.depth = text, depth
        self.random = torch.Generator().manual_seed(seed)

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        at = verified.start + len(verified.next_tokens)
        assert self.text[at] == int(verified.next_tokens[-1])
        assert cache.target.length == at
        return self.tree(self.text[at], self.text[at + 1 : at + 1 + min(self.depth, verified.room)])

    def tree(self, root: int, coming: list[int]) -> Tree:
        raise NotImplementedError

    def any_token(self) -> int:
        return int(torch.randint(97, (), generator=self.random))


class Oracle(Scripted):
    """Drafts the true continuation: 0 - 1 - 2 - ..."""

    def tree(self, root: int, coming: list[int]) -> Tree:
        return Tree(torch.tensor([root, *coming]), torch.arange(-1, len(coming)))


class Careless(Oracle):
    """An oracle that drafts on when there is no room left, as far as it knows the text, and beyond."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        at = verified.start + len(verified.next_tokens)
        return self.tree(self.text[at], (self.text[at + 1 :] + [1] * 20)[: self.depth])


class Hidden(Scripted):
    """The true continuation at random places of a random tree, so that the accepted path must be moved together.

    0 - 1 - 4
     \\- 2 - 3 - 7     truth: 0 2 5 8, perhaps
         \\- 5 - 8
         \\- 6
    """

    def tree(self, root: int, coming: list[int]) -> Tree:
        tokens, parents, last = [root], [-1], 0
        for token in coming:
            for _ in range(int(torch.randint(4, (), generator=self.random))):
                parents.append(int(torch.randint(len(tokens), (), generator=self.random)))
                tokens.append(self.any_token())
            parents.append(last)
            last = len(tokens)
            tokens.append(token)
        return Tree(torch.tensor(tokens), torch.tensor(parents))


class Duplicates(Scripted):
    """Every level twice, the true token among its copies:  0 - 1 - 3 - 5     1 = 2, 3 = 4, 5 = 6

    and each pair hangs below one of the pair before.           \\- 2   \\- 6
                                                                    \\- 4
    """

    def tree(self, root: int, coming: list[int]) -> Tree:
        tokens, parents = [root], [-1]
        for token in coming:
            above = 0 if len(tokens) == 1 else len(tokens) - int(torch.randint(1, 3, (), generator=self.random))
            tokens += [token, token]
            parents += [above, above]
        return Tree(torch.tensor(tokens), torch.tensor(parents))


class NeverRight(Scripted):
    """A wrong token at every node of a binary tree of 15."""

    def tree(self, root: int, coming: list[int]) -> Tree:
        wrong = {*range(97)} - {*self.text}
        tokens = [root] + [min(wrong)] * 14 if coming else [root]
        return Tree(torch.tensor(tokens), (torch.arange(1, len(tokens) + 1) // 2) - 1)


class HalfRightHead(DraftHead):
    """A head that sees the text to come through the positions, and knows two of three tokens.

    So a dynamic tree grown with it is right to varying depths, on varying branches.
    """

    kind = "half right"

    def __init__(self, target: TargetModel, text: list[int]) -> None:
        super().__init__()
        self.target, self.taps, self.vocab = target.config, target.taps, DraftVocab.full(97)
        self.feature_size, self.embedding = 32, target.embedding
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(len(text) + 40, 97, generator=generator)  # [positions, vocab]
        known = torch.tensor([t for t in range(len(text)) if t % 3])
        self.table[known, torch.tensor(text)[known]] += 3

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, 1, 8

    def project(self, taps: Tensor) -> Tensor:
        return taps[..., :32]

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask=None, cache=None) -> Tensor:
        hidden = torch.zeros_like(features)
        hidden[..., 0] = positions + 2  # index t predicts the token of position t + 2
        block = torch.zeros(1, 1, tokens.shape[1], 8)
        if cache is not None:
            cache.attend(0, block, block, block, mask)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]

    def feedback(self, hidden: Tensor) -> Tensor:
        return hidden


@dataclass(frozen=True)
class Text:
    """A prompt with what plain decoding makes of it."""

    target: TargetModel
    tokens: list[int]
    make_head: MakeHead


LIMITED = DraftVocab(torch.arange(0, 97, 4), 97)
DRAFTERS: dict[str, Callable[[Text], Drafter]] = {
    "head, chain": lambda text: HeadDrafter(text.make_head(), Growth.chain(5)),
    "head, wide tree": lambda text: HeadDrafter(text.make_head(), Growth(4, 6, 30)),
    "head, depth 1": lambda text: HeadDrafter(text.make_head(), Growth(1, 8, 8)),
    "head, few nodes of many": lambda text: HeadDrafter(text.make_head(seed=2), Growth(5, 4, 3)),
    "head of EAGLE-3.1": lambda text: HeadDrafter(text.make_head(fc_norm=True, norm_output=True), Growth(4, 4, 12)),
    "head of 25 tokens": lambda text: HeadDrafter(text.make_head(vocab=LIMITED), Growth(4, 4, 12)),
    "half right head, tree": lambda text: HeadDrafter(HalfRightHead(text.target, text.tokens), Growth(5, 4, 16)),
    "half right head, chain": lambda text: HeadDrafter(HalfRightHead(text.target, text.tokens), Growth.chain(3)),
    "oracle": lambda text: Oracle(text.tokens),
    "careless oracle": lambda text: Careless(text.tokens, depth=9),
    "truth hidden in a tree": lambda text: Hidden(text.tokens),
    "duplicate siblings": lambda text: Duplicates(text.tokens),
    "never right": lambda text: NeverRight(text.tokens),
}
all_drafters = pytest.mark.parametrize("drafter", DRAFTERS)


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> Callable[..., list[int]]:
    """plain(sampling, prompt=PROMPT, count=NEW_TOKENS): the new tokens of plain decoding."""
    known: dict[tuple[Sampling, tuple[int, ...], int], list[int]] = {}

    def decode(sampling: Sampling, prompt: list[int] = PROMPT, count: int = NEW_TOKENS) -> list[int]:
        key = sampling, tuple(prompt), count
        if key not in known:
            known[key] = generate(target, prompt, count, sampling).tokens
        return known[key]

    return decode


@all_samplings
@all_drafters
def test_any_drafter_writes_what_plain_decoding_writes(
    target: TargetModel, make_head: MakeHead, plain: Callable[..., list[int]], drafter: str, sampling: Sampling
) -> None:
    wanted = plain(sampling)
    made = DRAFTERS[drafter](Text(target, PROMPT + wanted, make_head))
    assert generate(target, PROMPT, NEW_TOKENS, sampling, made).tokens == wanted


@all_samplings
def test_plain_decoding_is_one_full_forward_per_token(
    target: TargetModel, plain: Callable[..., list[int]], sampling: Sampling
) -> None:
    """No cache, no step: argmax of log p and the noise of the position, over and over."""
    tokens = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
        logits = target.forward(torch.tensor([tokens])).logits[0, -1:]
        tokens.append(int(choice_scores(logits, torch.tensor([position]), sampling).argmax()))
    assert plain(sampling) == tokens[len(PROMPT) :]
    if sampling.temperature:
        assert plain(sampling) != plain(Sampling())


def test_greedy_is_transformers_own_generate(target: TargetModel, plain: Callable[..., list[int]]) -> None:
    for prompt in (PROMPT, [1], list(range(30))):
        written = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        assert plain(Sampling(), prompt) == written[0, len(prompt) :].tolist()
        assert target.generate([prompt], NEW_TOKENS)[0] == plain(Sampling(), prompt)


@pytest.mark.parametrize("prompt", [[3], [50, 51], list(range(40))], ids=len)
@pytest.mark.parametrize("drafter", ["head, wide tree", "half right head, tree", "truth hidden in a tree"])
def test_prompts_of_any_length_decode_alike(
    target: TargetModel, make_head: MakeHead, plain: Callable[..., list[int]], drafter: str, prompt: list[int]
) -> None:
    for sampling in (Sampling(), Sampling(1.0, 5)):
        wanted = plain(sampling, prompt)
        made = DRAFTERS[drafter](Text(target, prompt + wanted, make_head))
        assert generate(target, prompt, NEW_TOKENS, sampling, made).tokens == wanted


def test_a_drafter_may_be_used_again(target: TargetModel, make_head: MakeHead, plain: Callable[..., list[int]]) -> None:
    drafter = HeadDrafter(make_head(), Growth(4, 4, 12))
    for prompt in (PROMPT, [3]):
        assert generate(target, prompt, NEW_TOKENS, drafter=drafter).tokens == plain(Sampling(), prompt)


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gpt2, learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=3, n_head=4, initializer_range=0.4, bos_token_id=None, eos_token_id=None
        )
    ),
    "gemma2, every other layer sliding": lambda: Gemma2ForCausalLM(
        Gemma2Config(**{**SIZES, "sliding_window": 64, "attn_implementation": "eager"})
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_a_target(family: str) -> None:
    target = TargetModel(FAMILIES[family](), ())
    for sampling in (Sampling(), Sampling(1.0, 2)):
        wanted = generate(target, PROMPT, 16, sampling).tokens
        for drafter in (Hidden(PROMPT + wanted, depth=3), Duplicates(PROMPT + wanted), NeverRight(PROMPT + wanted)):
            assert generate(target, PROMPT, 16, sampling, drafter).tokens == wanted
    assert target.generate([PROMPT], 16)[0] == generate(target, PROMPT, 16).tokens


class Listener(Hidden):
    """Writes down what it is told."""

    def __init__(self, text: list[int], taps: tuple[int, ...]) -> None:
        super().__init__(text)
        self.taps = taps
        self.told: list[Verified] = []

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        self.told.append(verified)
        return super().draft(verified, cache)


@all_samplings
def test_a_drafter_is_told_what_a_forward_over_the_text_says(
    target: TargetModel, plain: Callable[..., list[int]], sampling: Sampling
) -> None:
    """Position by position, without a gap; wrong features would cost acceptance and nothing else."""
    text = PROMPT + plain(sampling)
    listener = Listener(text, target.taps)
    generate(target, PROMPT, NEW_TOKENS, sampling, listener)
    told, at = listener.told, 0
    for verified in told:
        assert verified.start == at
        at += len(verified.next_tokens)
        assert verified.room == len(text) - (at + 1) - 1  # tokens to come behind the root, one of them the bonus
        assert verified.sampling == sampling
    assert torch.cat([verified.next_tokens for verified in told]).tolist() == text[1 : at + 1]
    wanted = target.forward(torch.tensor([text[:at]])).taps[0]
    torch.testing.assert_close(torch.cat([verified.taps for verified in told]), wanted, atol=1e-4, rtol=1e-4)


@all_samplings
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_an_oracles_tau_is_its_depth_and_the_bonus(
    target: TargetModel, plain: Callable[..., list[int]], depth: int, sampling: Sampling
) -> None:
    new_tokens = 1 + 3 * (depth + 1)  # the first one comes out of the prompt's pass
    text = PROMPT + plain(sampling)
    result = generate(target, PROMPT, new_tokens, sampling, Oracle(text, depth))
    assert result.stats.tau == depth + 1
    assert result.stats.steps == 3
    assert result.stats.drafted == 3 * depth
    assert result.stats.accepted_at_depth == [3] * depth
    assert generate(target, PROMPT, new_tokens, sampling, Hidden(text, depth)).stats.tau == depth + 1


def test_who_drafts_nothing_right_gets_one_token_a_step(target: TargetModel, plain: Callable[..., list[int]]) -> None:
    for drafter in (NeverRight(PROMPT + plain(Sampling())), NoDrafter()):
        result = generate(target, PROMPT, NEW_TOKENS, drafter=drafter)
        assert result.stats.tau == 1
        assert result.stats.steps == NEW_TOKENS - 1
        assert result.stats.accepted_at_depth == []


@pytest.mark.parametrize("drafter", ["head, wide tree", "half right head, tree", "oracle", "careless oracle"])
def test_no_number_of_new_tokens_is_overshot(
    target: TargetModel, make_head: MakeHead, plain: Callable[..., list[int]], drafter: str
) -> None:
    sampling = Sampling(1.0, 1)
    wanted = plain(sampling)
    for count in range(1, 13):
        made = DRAFTERS[drafter](Text(target, PROMPT + wanted, make_head))
        assert generate(target, PROMPT, count, sampling, made).tokens == wanted[:count]


@pytest.mark.parametrize("drafter", ["head, wide tree", "oracle", "truth hidden in a tree", "duplicate siblings"])
def test_an_end_token_inside_a_path_ends_the_text_where_plain_does(
    target: TargetModel,
    make_head: MakeHead,
    plain: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
) -> None:
    """Each token of the text in turn ends it, be it the first, a drafted one, or the bonus behind a path."""
    sampling = Sampling(0.7, 1)
    text = plain(sampling)
    for end in dict.fromkeys(text[:9]):
        monkeypatch.setattr(target, "end_tokens", [end, 96])
        wanted = text[: text.index(end) + 1]
        assert generate(target, PROMPT, NEW_TOKENS, sampling).tokens == wanted
        made = DRAFTERS[drafter](Text(target, PROMPT + text, make_head))
        result = generate(target, PROMPT, NEW_TOKENS, sampling, made)
        assert result.tokens == wanted
        assert result.stats.tokens == len(wanted) - 1


@pytest.fixture
def forwards(target: TargetModel) -> Iterator[list[int]]:
    """The number of tokens of each forward of the target, as they come."""
    seen: list[int] = []
    embedding = target.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    yield seen
    handle.remove()


def test_what_does_not_fit_the_positions_is_refused_before_any_forward(
    target: TargetModel, forwards: list[int]
) -> None:
    prompt = [1] * 246
    with pytest.raises(ValueError, match=r"246 tokens and max_new_tokens 11 exceed .* 256 positions.* to 245"):
        generate(target, prompt, 11)
    with pytest.raises(ValueError, match=r"256 positions.* to 0 tokens"):
        generate(target, [1], 300)
    assert forwards == []
    assert len(generate(target, prompt, 10).tokens) == 10
    assert forwards == [246] + [1] * 9


def test_the_last_position_is_reached_with_a_drafter_too(target: TargetModel, make_head: MakeHead) -> None:
    """Also by trees that would go deeper than what is left."""
    prompt = torch.randint(97, (244,)).tolist()
    wanted = generate(target, prompt, 12).tokens
    for growth in (Growth.chain(20), Growth(9, 4, 30)):
        assert generate(target, prompt, 12, drafter=HeadDrafter(make_head(), growth)).tokens == wanted
    right = HeadDrafter(HalfRightHead(target, prompt + wanted), Growth(9, 4, 30))
    assert generate(target, prompt, 12, drafter=right).tokens == wanted


def test_impossible_requests_are_refused_before_any_forward(target: TargetModel, forwards: list[int]) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(target, [], 5)
    for count in (0, -3):
        with pytest.raises(ValueError, match=f"max_new_tokens: {count} given, 1 or more is allowed"):
            generate(target, PROMPT, count)
    assert forwards == []


def test_a_drafter_of_other_taps_is_refused_with_both(
    target: TargetModel, make_head: MakeHead, forwards: list[int]
) -> None:
    drafter = HeadDrafter(make_head(taps=(1, 3, 5)), Growth.chain(3))
    with pytest.raises(ValueError, match=r"reads taps \[1, 3, 5\], the target gives \[2, 3, 4\]"):
        generate(target, PROMPT, 5, drafter=drafter)
    assert forwards == []


@pytest.mark.parametrize("drafter", ["head, wide tree", "oracle", "truth hidden in a tree", "never right"])
def test_a_stream_yields_what_generate_returns(
    target: TargetModel, make_head: MakeHead, plain: Callable[..., list[int]], drafter: str
) -> None:
    """A block for the prompt's pass, then one for each step, none of them empty."""
    sampling, stats = Sampling(1.0, 1), DecodeStats()
    text = Text(target, PROMPT + plain(sampling), make_head)
    blocks = list(stream(target, PROMPT, NEW_TOKENS, sampling, DRAFTERS[drafter](text), stats))
    whole = generate(target, PROMPT, NEW_TOKENS, sampling, DRAFTERS[drafter](text))
    assert [token for block in blocks for token in block] == whole.tokens
    assert all(blocks)
    assert len(blocks[0]) == 1
    assert stats.steps == len(blocks) - 1
    assert stats.tokens == len(whole.tokens) - 1
    assert dataclasses.replace(whole.stats, seconds=0.0) == stats


def test_a_stream_left_early_costs_nothing_more(target: TargetModel, forwards: list[int]) -> None:
    blocks = stream(target, PROMPT, NEW_TOKENS)
    assert forwards == []
    assert next(blocks) + next(blocks) == generate(target, PROMPT, 2).tokens
    assert isinstance(blocks, Generator)
    blocks.close()
    assert not torch.is_inference_mode_enabled()


def test_stats_add_up(target: TargetModel, plain: Callable[..., list[int]]) -> None:
    text = PROMPT + plain(Sampling())
    parts = [generate(target, PROMPT, 12, drafter=Oracle(text, depth)) for depth in (5, 1)]
    parts.append(Generation([], DecodeStats()))
    total = DecodeStats()
    for part in parts:
        total.add(part.stats)
    assert total.tokens == 22
    assert total.steps == 2 + 6  # 11 tokens behind the first: 6 and 5, or 2 at a time and one alone
    assert total.accepted_at_depth == [2 + 5, 2, 2, 2, 1]
    assert DecodeStats().tau == 0


def test_acceptance_by_depth_of_many_texts_is_not_counted_twice() -> None:
    total = DecodeStats()
    for paths in ([3, 1], [1, 2], [4]):
        stats = DecodeStats()
        for length in paths:
            stats.count(path_length=length, kept=length, drafted=5)
        total.add(stats)
    assert total.steps == 5
    assert total.accepted_at_depth == [3, 2, 1]  # paths of 3, 2 and 4 nodes, the root not counted
