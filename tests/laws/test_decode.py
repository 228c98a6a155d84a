"""The law of decoding: a drafter changes how fast a text is written, never a token of it, however it is sampled."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, SOME_FAMILIES, WINDOW, make_family
from matrix import slow_unless
from scripted import DRAFTERS, LOPSIDED, HalfRightHead, Hidden, Listener, Oracle, Texts, blocks_of
from shared_fixtures import HeadFactory
from tiny_run import make_dense

from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.drafter import Drafter, NoDrafter
from headstart.inference.core.history import History
from headstart.inference.core.request import DecodeStats, Generation, Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic, Growth
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.engine.loop import generate, generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import BlockSection, Eagle3Section, HeadSection, PEagleSection

PROMPT, NEW_TOKENS = [5, 6, 7, 11], 8
INF = float("inf")
SAMPLINGS = {
    "greedy": Sampling(),
    "T=0.7": Sampling(0.7),
    "T=1": Sampling(1.0, seed=2),
    "T=2, top-k": Sampling(2.0, top_k=6, seed=3),
    "T=0.7, top-p": Sampling(0.7, top_p=0.9, seed=4),
    "T=1, min-p": Sampling(1.0, min_p=0.1, seed=5),
    "greedy, penalties": Sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "all at once": Sampling(0.8, 40, 0.95, 0.01, 1.2, -0.3, 1.5, logit_bias=((5, -INF), (90, 2.5), (3, 1.0)), seed=6),
}
Plain = Callable[..., list[int]]
Drafting = Callable[..., Drafter]
MAIN_NAMES = ("greedy", "T=1", "all at once")
main_samplings = pytest.mark.parametrize("sampling", [SAMPLINGS[name] for name in MAIN_NAMES], ids=MAIN_NAMES)


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> Plain:
    known: dict[tuple[Sampling, tuple[int, ...], int], list[int]] = {}

    def decode(sampling: Sampling, prompt: list[int] = PROMPT, count: int = NEW_TOKENS) -> list[int]:
        key = sampling, tuple(prompt), count
        if key not in known:
            known[key] = generate(target, prompt, count, sampling).tokens
        return known[key]

    return decode


@pytest.fixture
def make_drafter(target: TargetModel, make_head: HeadFactory) -> Drafting:
    return lambda name, *texts: DRAFTERS[name](Texts(target, list(texts), make_head))


# These are tried with every sampling, all other drafters with the main ones.
WITH_ALL_SAMPLINGS = ("half right head, fixed tree", "truth hidden in a tree")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("drafter_name", "sampling"),
    [
        pytest.param(drafter_name, sampling, id=f"{drafter_name}-{sampling_name}")
        for drafter_name in DRAFTERS
        for sampling_name, sampling in SAMPLINGS.items()
        if drafter_name in WITH_ALL_SAMPLINGS or sampling_name in MAIN_NAMES
    ],
)
def test_any_drafter_writes_what_plain_decoding_writes(target, make_drafter, plain, drafter_name, sampling) -> None:
    wanted = plain(sampling)
    drafter = make_drafter(drafter_name, PROMPT + wanted)
    assert generate(target, PROMPT, NEW_TOKENS, sampling, drafter).tokens == wanted


@pytest.mark.parametrize("name", slow_unless(MAIN_NAMES, SAMPLINGS))
def test_plain_decoding_equals_one_full_forward_per_token(target: TargetModel, plain: Plain, name: str) -> None:
    """The reference needs no cache: each token is the argmax of log p plus the Gumbel noise of its position."""
    sampling = SAMPLINGS[name]
    output: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS):
        logits = target.passes.forward(torch.tensor([PROMPT + output])).logits[:, -1:]
        history = History.start([PROMPT], 97, "cpu")
        history.counts[0, 0] = torch.tensor(output, dtype=torch.long).bincount(minlength=97)
        choice = BatchSampling([sampling], "cpu").choose(logits, torch.tensor([[position]]), history)
        output.append(int(choice))
    assert plain(sampling) == output
    if sampling != Sampling():
        assert plain(sampling) != plain(Sampling())


SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "taps": (0, 1, 2)}
SECTIONS: tuple[HeadSection, ...] = (
    Eagle3Section(kind="eagle3", **SIZES),
    BlockSection(kind="block", block_size=4, markov_rank=6, **SIZES),
    PEagleSection(kind="peagle", depths=4, num_layers=2, **SIZES),
)


@pytest.mark.parametrize("family", slow_unless(SOME_FAMILIES, FAMILIES))
def test_every_family_decodes_losslessly_alone_and_in_batches(family: str) -> None:
    """Some prompts fit in the sliding window and some do not. A batch mixes greedy, T = 0.7 with top-p, and T = 1.

    Greedy text must also equal the choices of a full forward without a cache.
    """
    target, count = TargetModel(FAMILIES[family](), (0, 1, 2)), 5
    samplings = itertools.cycle([Sampling(), Sampling(0.7, top_p=0.9, seed=1), Sampling(1.0, seed=2)])
    lengths = WINDOW + 9, WINDOW - 3, 2
    requests = [Request([*range(length)], count, next(samplings)) for length in lengths]
    wanted = [generate(target, request.prompt, count, request.sampling).tokens for request in requests]
    whole = [request.prompt + text for request, text in zip(requests, wanted, strict=True)]
    assert [each.tokens for each in generate_batch(target, requests, Hidden(*whole), 1)] == wanted
    heads = list[Drafter]()
    for section in SECTIONS:
        head = new_head(section, target.frozen, DraftVocab.full(97), seed=1).eval()
        make_dense(head)
        heads.append(head_drafter(head.requires_grad_(False), Dynamic(2, 12, 36)))
    draft, accepted = TargetModel(FAMILIES[family](), ()), list[float]()
    models = [ModelDrafter(draft, growth, target) for growth in (LOPSIDED, Dynamic.chain(4))]
    for drafter in (Hidden(*whole), Lookup(Growth(5, 3, 12)), *heads, *models):
        found = generate_batch(target, requests, drafter, 3)
        assert [generation.tokens for generation in found] == wanted, drafter
        accepted += [each.stats.acceptance_length for each in found if drafter in heads]
    assert max(accepted) > 1
    assert all(each.stats.steps == 1 for each in found)  # the draft model's copy of the target is always right
    for request, text in zip(requests, whole, strict=True):
        if request.sampling == Sampling():
            choices = target.model(torch.tensor([text]), use_cache=False).logits[0].argmax(-1)
            assert choices[-1 - count : -1].tolist() == text[-count:]


@main_samplings
def test_a_drafter_receives_the_taps_of_a_forward_over_the_text(target, plain, sampling) -> None:
    """Every position comes exactly once. Wrong taps would only lower acceptance, so no text would show them."""
    text = PROMPT + plain(sampling)
    listener = Listener(text)
    listener.taps = target.taps
    generate(target, PROMPT, NEW_TOKENS, sampling, listener)
    assert listener.first_text.tolist() == [text[: len(PROMPT) + 1]]
    position = len(PROMPT) - 1  # of the root
    for verified in listener.told:
        (row,) = verified.rows
        assert row.start == position
        position += row.count
        assert verified.next_tokens.shape == (1, row.count)
        assert verified.roots.tolist() == [[text[position]]]
        assert row.text == text[: position + 1]
        assert row.remaining == len(text) - (position + 1) - 1  # after the root, without the bonus token
        assert verified.sampling.samplings == (sampling,)
    received = torch.cat([verified.next_tokens for verified in listener.told], dim=1)
    assert received[0].tolist() == text[len(PROMPT) : position + 1]
    taps = torch.cat([listener.first_taps[:, :-1], *(verified.taps for verified in listener.told)], dim=1)
    torch.testing.assert_close(taps, target.passes.forward(torch.tensor([text[:position]])).taps, atol=1e-4, rtol=1e-4)


@pytest.mark.each_value
@main_samplings
@pytest.mark.parametrize("depth", [1, 5])
def test_an_oracles_acceptance_length_is_its_depth_plus_the_bonus_token(target, plain, depth, sampling) -> None:
    new_tokens = 1 + 3 * (depth + 1)  # prefill gives the first one
    text = PROMPT + plain(sampling, count=20)
    result = generate(target, PROMPT, new_tokens, sampling, Oracle(text, ahead=depth))
    stats = result.stats
    assert (stats.acceptance_length, stats.steps, stats.drafted) == (depth + 1, 3, 3 * depth)
    assert (stats.accepted_at_depth, stats.acceptance) == ([3] * depth, [1] * depth)
    hidden = generate(target, PROMPT, new_tokens, sampling, Hidden(text, ahead=depth)).stats
    assert hidden.acceptance_length == depth + 1


def test_drafts_of_a_half_right_head_are_accepted_to_varying_depths(target, make_drafter, plain) -> None:
    """Without such a head the laws above would prove little: drafts would be either all rejected or all accepted."""
    for sampling in (Sampling(), Sampling(1.0, seed=2)):
        drafter = make_drafter("half right head, tree", PROMPT + plain(sampling, count=20))
        stats = generate(target, PROMPT, 20, sampling, drafter).stats
        assert 1.3 < stats.acceptance_length < 5
        assert stats.accepted_at_depth[0] > stats.accepted_at_depth[-1] > 0


@pytest.mark.parametrize("drafter_name", ["none", "oracle", "truth hidden in a tree"])
def test_an_end_token_on_an_accepted_path_ends_the_text(target, make_drafter, plain, monkeypatch, drafter_name) -> None:
    """Each of the first seven tokens in turn is the end token: the first one, draft tokens and bonus tokens."""
    sampling = Sampling(0.7, seed=1)
    text = plain(sampling)
    drafter = NoDrafter() if drafter_name == "none" else make_drafter(drafter_name, PROMPT + text)
    for end in dict.fromkeys(text[:7]):
        monkeypatch.setattr(target, "end_tokens", [end, 96])
        wanted = text[: text.index(end) + 1]
        for longest in (NEW_TOKENS, len(wanted)):  # in the last place, too, it is an end
            result = generate(target, PROMPT, longest, sampling, drafter)
            assert (result.tokens, result.finish, result.stats.tokens) == (wanted, "end", len(wanted) - 1)


@main_samplings
def test_logprobs_are_the_targets_own(target, make_drafter, plain, sampling) -> None:
    text = plain(sampling)
    all_logits = target.passes.forward(torch.tensor([PROMPT + text])).logits[0, len(PROMPT) - 1 : -1]
    wanted = all_logits.log_softmax(-1).gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    for drafter in (None, make_drafter("truth hidden in a tree", PROMPT + text)):
        result: Any = generate_batch(target, [Request(PROMPT, NEW_TOKENS, sampling, logprobs=True)], drafter)[0]
        assert result.tokens == text
        assert len(result.logprobs) == len(text)
        torch.testing.assert_close(torch.tensor(result.logprobs), wanted, atol=1e-4, rtol=0)
    assert generate(target, PROMPT, 5).logprobs is None


@pytest.fixture
def forwards(target: TargetModel) -> Iterator[list[int]]:
    """The number of tokens in each forward of the target so far."""
    counts: list[int] = []
    embedding = target.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[-1]))
    yield counts
    handle.remove()


def test_a_request_beyond_the_targets_positions_is_refused_before_any_forward(target, forwards) -> None:
    prompt = [1] * 246
    with pytest.raises(ValueError, match=r"246 tokens and max_new_tokens 11 exceed .* 256 positions.* to 245"):
        generate(target, prompt, 11)
    with pytest.raises(ValueError, match=r"up to 255 new tokens"):
        generate(target, [1], 300)
    with pytest.raises(ValueError, match=r"256 positions"):
        generate_batch(target, [Request([1], 5), Request(prompt, 11)])
    assert forwards == []
    assert len(generate(target, prompt, 10).tokens) == 10
    assert forwards == [246] + [1] * 9


def test_a_text_that_would_change_the_keys_of_earlier_positions_is_refused() -> None:
    """LongRoPE rotates every position differently once a text exceeds 48 tokens, and cached keys cannot follow."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limited = {"rope_parameters": {**rope, "original_max_position_embeddings": 48, "factor": 2.0}}
    target = TargetModel(make_family("phi3", original_max_position_embeddings=48, **limited), ())
    with pytest.raises(ValueError, match="20 tokens and max_new_tokens 29 exceed the target's 48 positions"):
        generate(target, [*range(20)], 29)
    wanted = generate(target, [*range(20)], 28).tokens
    assert generate(target, [*range(20)], 28, drafter=Oracle([*range(20), *wanted])).tokens == wanted
    assert target.generate([[*range(20)]], 28) == [wanted]


def test_a_drafter_reaches_the_targets_last_position(target: TargetModel, make_head: HeadFactory) -> None:
    prompt = torch.randint(97, (244,)).tolist()
    wanted = generate(target, prompt, 12).tokens
    for growth in (Dynamic.chain(20), Dynamic(9, 4, 30)):
        assert generate(target, prompt, 12, drafter=HeadDrafter(make_head(), growth)).tokens == wanted
    half_right = HeadDrafter(HalfRightHead(target, prompt + wanted), Dynamic(9, 4, 30))
    assert generate(target, prompt, 12, drafter=half_right).tokens == wanted


@pytest.mark.parametrize("static", [False, True])
def test_each_drafter_receives_its_own_taps_from_a_target_that_gives_more(target: TargetModel, static: bool) -> None:
    """Two rows and three requests: when the first row ends, the second one moves into its place."""
    shared = TargetModel(target.model, (0, 1, 2, 3, 4))
    requests = [Request(PROMPT, 3), Request([3], 9), Request([*range(9)], 5)]
    texts = [request.prompt + generate(target, request.prompt, request.max_new_tokens).tokens for request in requests]
    for taps in ((1, 3, 4), (3, 0), (0, 1, 2, 3, 4)):
        received = []
        for model in (shared, TargetModel(target.model, taps)):
            listener = Listener(*texts)
            listener.taps = taps
            generate_batch(model, requests, listener, 2, static)
            received.append([listener.first_taps, *(verified.taps for verified in listener.told)])
        assert received[0][0].shape[-1] == len(taps) * target.config.hidden_size
        assert all(torch.equal(one, other) for one, other in zip(*received, strict=True))


def test_a_stream_runs_only_as_far_as_it_is_read_and_closes_cleanly(target: TargetModel, forwards: list[int]) -> None:
    blocks: Any = blocks_of(target, Request(PROMPT, NEW_TOKENS))
    assert forwards == []
    assert next(blocks) + next(blocks) == generate(target, PROMPT, 2).tokens
    blocks.close()
    assert not torch.is_inference_mode_enabled()


def test_generate_changes_neither_the_prompt_nor_the_global_random_state(target: TargetModel, plain: Plain) -> None:
    prompt, state = list(PROMPT), torch.get_rng_state()
    generate(target, prompt, 8, Sampling(1.0), Hidden(PROMPT + plain(Sampling(1.0))))
    assert prompt == PROMPT
    assert torch.equal(torch.get_rng_state(), state)


def test_stats_add_up(target: TargetModel, plain: Plain) -> None:
    text = PROMPT + plain(Sampling(), count=13)
    parts = [generate(target, PROMPT, 12, drafter=Oracle(text, ahead=depth)) for depth in (5, 1)]
    parts += [Generation(), generate(target, PROMPT, 12, drafter=Hidden(text))]
    total = DecodeStats.sum_of(part.stats for part in parts)
    assert total.tokens == 33
    assert total.steps == 2 + 6 + 2  # the 11 tokens after the first come as 6 + 5, or as five times 2 and one
    assert total.accepted_at_depth == [2 + 5 + 2, 4, 4, 4, 2]
    assert total.drafted == sum(part.stats.drafted for part in parts) > 0
    assert total.seconds == sum(part.stats.seconds for part in parts) > 0
    assert DecodeStats().acceptance_length == 0
