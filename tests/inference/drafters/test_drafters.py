"""Laws of the drafters that need no training: they never change the text, and each drafts what its method says. Repeats
add to what a head drafts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import PENALTIES, SetCosts, noisy_copy, paths
from tiny_run import build_tokenizer

from headstart.inference.core.cache import KVCache
from headstart.inference.core.gumbel import gumbel_noise
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Accepted, VerifiedOnHost, VerifiedRow
from headstart.inference.drafters.build import build_drafter
from headstart.inference.drafters.costs import CostAware
from headstart.inference.drafters.growth import Dynamic, Fixed, Growth
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.drafters.model import ModelDrafter
from headstart.inference.drafters.repeats import PRIOR_TOKENS, REPEAT_DEPTH, REPEAT_RATES, Continuations, Repeats
from headstart.inference.engine.loop import generate, generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection

NO_CACHE = KVCache.allocate((1, 1, 1), None, 1)
# The chain of the likeliest token at each of four depths, with branches.
BUSHY = Fixed(((0,), (1,), (2,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)))


def verified_text(text: list[int], remaining: int, sampling: Sampling | None = None, key: int = 0) -> VerifiedOnHost:
    own, root = BatchSampling([sampling or Sampling()], "cpu"), torch.tensor([text[-1:]])
    rows = [VerifiedRow(text, len(text) - 2, 1, remaining, key)]
    return VerifiedOnHost(torch.zeros(1, 1, 0), root, root, own, None, rows)


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4), PENALTIES], ids=["greedy", "T=1", "penalties"])
@pytest.mark.parametrize("static", [False, True])
def test_a_draft_model_that_is_the_target_is_always_right(target, sampling, static) -> None:
    """It uses the same Gumbel noise and penalties, and rows of different lengths do not affect each other."""
    requests = [Request(prompt, 1 + 3 * 5, sampling) for prompt in ([5, 6, 7, 11], [3], [*range(30)])]
    for growth in (Dynamic.chain(4), BUSHY):
        for found in generate_batch(target, requests, ModelDrafter(target, growth, target), 3, static):
            assert found.stats.accepted_at_depth == [3] * 4


def test_a_draft_model_must_fit_but_for_the_size_of_its_vocabulary(target, make_model) -> None:
    with pytest.raises(ValueError, match=r"decode\.draft_model: a model with 128 positions given"):
        ModelDrafter(TargetModel(make_model(max_position_embeddings=128), ()), Dynamic.chain(2), target)
    with pytest.raises(ValueError, match=r"decode\.draft_model: torch\.float64 on cpu given"):
        ModelDrafter(TargetModel(make_model().double(), ()), Dynamic.chain(2), target)
    prompt, added = [5, 96, 6, 7], Sampling(logit_bias=((90, 99.0),))
    for sampling, size in ((Sampling(), 120), (added, 64)):
        drafter = ModelDrafter(TargetModel(make_model(vocab_size=size), ()), Dynamic(3, 3, 9), target)
        assert len(drafter.ids) == min(size, 97)
        wanted = generate(target, prompt, 8, sampling).tokens
        assert generate(target, prompt, 8, sampling, drafter).tokens == wanted


def test_a_draft_model_reads_its_root_where_the_cache_has_moved_it(target, monkeypatch) -> None:
    """When a row of a batch moved or the cache grew, the root's pending key was lost. Draft tokens then attended to a
    gap, and only the acceptance rate showed it. A draft model that is a copy of the target must always be right.
    """
    drafter = ModelDrafter(noisy_copy(target, 0.0), Dynamic.chain(4), target)
    short, long = Request([3], 7, Sampling(1.0, seed=2)), Request([5, 6, 7], 61, Sampling(1.0, seed=1))
    always = [12] * 4  # every one of the 12 steps after the prefill accepts all four draft tokens
    for module in ("headstart.inference.engine.batch", "headstart.inference.core.cache"):
        monkeypatch.setattr(f"{module}.PAGE_TOKENS", 16)
    for requests, static in (([short, long], False), ([short, long], True)):
        stats = generate_batch(target, requests, drafter, 2, static)[-1].stats
        assert (stats.steps, stats.accepted_at_depth[:4]) == (12, always), static


def drafted_paths(drafter: Lookup, text: list[int], remaining: int = 99) -> set[tuple[int, ...]]:
    return paths(drafter.draft(verified_text(text, remaining), NO_CACHE))[0]


def test_prompt_lookup_follows_the_longest_ngram_prefers_the_latest_and_keeps_the_most_probable() -> None:
    text = [1, 2, 3, 9, 9, 7, 2, 3, 5, 8, 2, 3, 4, 1, 2, 3]
    chain = Lookup(Growth(3, 1, 3), ngram=3)
    assert drafted_paths(chain, text) == {(9,), (9, 9), (9, 9, 7)}  # 1 2 3 occurred once before
    bigrams = Lookup(Growth(3, 1, 3), ngram=2)
    assert drafted_paths(bigrams, text) == {(4,), (4, 1), (4, 1, 2)}  # 2 3 occurred three times before
    wide = drafted_paths(Lookup(Growth(2, 3, 6), ngram=2), text)
    assert wide == {(4,), (5,), (9,), (4, 1), (5, 8), (9, 9)}
    assert drafted_paths(chain, text, remaining=1) == {(9,)}
    assert drafted_paths(chain, [1, 2, 3]) == set()
    repeated = drafted_paths(Lookup(Growth(5, 1, 5), ngram=2), [3, 1, 2, 1, 2])
    assert repeated == {(1, 2, 1, 2, 1)[:count] for count in range(1, 6)}
    # 1 2 occurs 9 times, 1 3 once, and 4 always follows 2, 5 always follows 3; probabilities in brackets:
    # root 1 - 2 (.9) - 4 (.9)
    # \\- 3 (.1) - 5 (.1)
    text = [1, 2, 4] * 9 + [1, 3, 5, 7, 1]
    drafted = [drafted_paths(Lookup(Growth(2, 2, nodes), ngram=1), text) for nodes in (1, 2, 3, 4)]
    assert drafted == [{(2,)}, {(2,), (2, 4)}, {(2,), (2, 4), (3,)}, {(2,), (2, 4), (3,), (3, 5)}]


def test_continuations_match_a_naive_search() -> None:
    text = torch.randint(3, (60,)).tolist()
    for end in range(2, 60):
        for ngram in (1, 2, 4):
            places, length = Continuations.of_longest_match(text[:end], ngram)
            tail, sizes = text[:end], range(1, ngram + 1)
            ends = {n: [i + n for i in range(end - n) if tail[i : i + n] == tail[end - n :]] for n in sizes}
            best = max((n for n in ends if ends[n]), default=0)
            assert length == best
            assert [place for place, _ in places.places] == (ends[best][::-1] if best else [])


def test_a_lookup_ranks_siblings_by_the_targets_gumbel_noise() -> None:
    """Gumbel noise decides among tokens that followed equally often, as it will decide the target's choice."""
    text = [token for follower in range(10, 70) for token in (1, follower)] + [5, 1]
    drafter, first = Lookup(Growth(1, 1, 1), ngram=1), set()
    for seed in range(8):
        verified = verified_text(text, 99, Sampling(1.0, seed=seed))
        gumbel = gumbel_noise(verified.sampling.seeds, torch.tensor([[len(text)]]), torch.arange(10, 70))[0, 0]
        assert paths(drafter.draft(verified, NO_CACHE))[0] == {(10 + int(gumbel.argmax()),)}
        first.add(int(gumbel.argmax()))
    assert len(first) > 4


def test_a_recipe_selects_its_drafter(target_folder: Path, tmp_path: Path) -> None:
    folder, draft_model = tmp_path / "target", tmp_path / "draft_model"
    for copied in (folder, draft_model):
        shutil.copytree(target_folder, copied)
        build_tokenizer().save_pretrained(copied)
    source = TargetSection(path=str(folder), dtype="float32", device="cpu")
    target = TargetModel.load(source, ())

    def build(**fields: Any) -> Any:
        return build_drafter(DecodeSection(**fields), target, source)

    assert build(drafter="prompt_lookup").growth == Growth(5, 4, 16)
    assert build(drafter="prompt_lookup", growth="chain", depth=3).growth == Growth(3, 1, 3)
    drafter = build(drafter="draft_model", draft_model=str(draft_model), growth="chain", depth=2)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.growth == Dynamic.chain(2)
    other = json.loads((draft_model / "tokenizer.json").read_text())
    vocab = other["model"]["vocab"]
    swapped = {"a": vocab["b"], "b": vocab["a"]}
    other["model"]["vocab"] = {**vocab, **swapped}
    (draft_model / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"decode\.draft_model: .* has another tokenizer than .*, the target"):
        build(drafter="draft_model", draft_model=str(draft_model))


PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
LOOP = Sampling(logit_bias=((9, 50.0),))  # writes token 9 forever


class Everything(Dynamic):
    """Finds each repeat worth its verification."""

    def is_worth(self, drafted: int, chance: float) -> bool:
        return True


def beside(text: list[int], tree: Tree, growth: Dynamic | None = None, most: int = 6, remaining: int = 99) -> Tree:
    return Repeats(most).extend(tree, verified_text(text, remaining), growth or Everything(3, 3, 8))


def drawn(parents: list[int], tokens: list[int]) -> Tree:
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), deepest=2)


def after(verified: VerifiedOnHost, tokens: list[int], choices: list[int]) -> VerifiedOnHost:
    """The same text after a step that verified these nodes, all of them drafted but the first."""
    accepted = Accepted([0], choices[:1], len(tokens) - 1, choices, tokens)
    return replace(verified, rows=[replace(verified.rows[0], accepted=accepted)])


def test_the_tree_holds_what_the_head_drafted_and_what_followed_the_same_words_as_far_as_a_row_can_use_it() -> None:
    text = [*PHRASE, 1, 2, *PHRASE[:3]]
    found = beside(text, drawn([-1, 0, 0, 1], [13, 14, 50, 51]), most=3)
    # Token 14 is both; the repeat goes on behind it, by three tokens that the head has not thought of.
    assert paths(found)[0] == {(14,), (50,), (14, 51), (14, 15), (14, 15, 16), (14, 15, 16, 17)}
    assert found.tokens.shape[1] == len(paths(found)[0]) + 1
    assert (found.deepest, found.levels) == (4, 2)
    tree = drawn([-1, 0], [5, 7])
    assert beside([1, 2, 3, 4, 5], tree) is tree
    assert beside([*PHRASE, 1, *PHRASE[:3]], tree, most=0) is tree
    found = beside([*PHRASE, 1, *PHRASE[:3]], drawn([-1, -1], [13, 50]), remaining=2)
    assert paths(found)[0] == {(14,), (14, 15)}
    assert max(map(len, paths(beside([9] * 40, drawn([-1], [9]), most=40))[0])) == REPEAT_DEPTH


def test_repeats_end_where_their_chance_is_not_worth_it_and_in_sampled_rows_at_the_heads_depth() -> None:
    """Policies without costs verify tokens down to a chance of 0.15; two matching tokens promise a half of the next."""
    found = beside([*PHRASE, 1, *PHRASE[1:3]], drawn([-1], [13]), Dynamic(3, 3, 8))
    assert REPEAT_RATES[2] == 0.5
    assert paths(found)[0] == {(14,), (14, 15)}
    # Noise is drawn for the head's levels only.
    text = [*PHRASE, 1, *PHRASE[:3]]
    verified = replace(verified_text(text, 99), sampling=BatchSampling([Sampling(1.0)], "cpu"))
    found = Repeats(6).extend(drawn([-1], [13]), verified, Everything(3, 3, 8))
    assert max(map(len, paths(found)[0])) == 3


def test_a_text_that_does_not_repeat_its_repeats_gets_fewer() -> None:
    repeats, growth, text = Repeats(6), Dynamic(3, 3, 8), [*PHRASE, 1, *PHRASE[:3]]
    counts = []
    for wrong in range(60, 90):
        counts.append(len(paths(repeats.extend(drawn([-1], [13]), verified_text(text, 99), growth))[0]))
        text += [wrong, *PHRASE[:3]]  # the phrase begins again and never goes on
    assert counts[0] > counts[10] >= counts[-1] == 0
    other = [*PHRASE, 1, *PHRASE[:3]]
    assert len(paths(repeats.extend(drawn([-1], [13]), verified_text(other, 99, key=1), growth))[0]) == counts[0]
    assert [*repeats.rows] == [1]  # of texts that have ended nothing is kept


def test_what_was_right_is_counted_as_far_as_the_text_tells() -> None:
    repeats, text = Repeats(6), [*PHRASE, 1, *PHRASE[:3]]
    repeats.extend(drawn([-1], [13]), verified_text(text, 99), Everything(3, 3, 8))
    row = repeats.rows[0]
    text += [14, 15, 99]  # two of the repeat, then another token
    repeats.extend(drawn([-1], [99]), verified_text(text, 99), Everything(3, 3, 8))
    assert row.tried[3] == PRIOR_TOKENS + 3
    assert row.right[3] == pytest.approx(PRIOR_TOKENS * REPEAT_RATES[3] + 2)


def test_a_loop_is_written_in_long_steps_from_the_first_repeat_on_alone_and_beside_others(target, make_head) -> None:
    requests = [
        Request([5, 6, 7, 11], 24, LOOP),
        Request([*PHRASE, 1, *PHRASE[:4]], 16),
        Request([3, 4] * 9, 14, Sampling(1.0, seed=4)),
        Request([8, 2], 12, Sampling(0.7, seed=5, logit_bias=((9, 9.0),))),
    ]
    plain = [generate_batch(target, [each])[0].tokens for each in requests]
    drafters = [HeadDrafter(make_head(), Dynamic(3, 3, 8), repeats) for repeats in (None, Repeats(8))]
    without, alone = (generate_batch(target, requests[:1], drafter)[0] for drafter in drafters)
    assert alone.tokens == without.tokens == plain[0] == [9] * 24
    assert alone.stats.steps <= without.stats.steps / 2
    assert [each.tokens for each in generate_batch(target, requests, drafters[1], max_batch=3)] == plain


def test_what_the_target_chose_after_a_token_is_drafted_after_it_again() -> None:
    """Also after a rejected draft token, and in another text: 7 was rejected, and the target would go on with 8."""
    repeats, chances = Repeats(6), torch.tensor([[0.5, 0.125]]).log()
    first = after(verified_text([1, 2, 3], 99), [2, 7, 9], [3, 8, 4])
    assert repeats.extend(drawn([-1], [3]), first, Dynamic(3, 3, 8)).shape == (1, 1)
    tree = replace(drawn([-1, 0, 1], [5, 7, 50]), log_chances=chances)
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Dynamic(3, 3, 8))
    # Node 7 has a chance of 0.5, of which its child 50 has a quarter; 8 gets a quarter of the rest, below the limit.
    assert found is tree
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Everything(3, 3, 8))
    assert paths(found)[0] == {(7,), (7, 50), (7, 8)}
    for _ in range(2):  # the same choice again makes it likelier: a half of the rest
        repeats.extend(drawn([-1], [3]), replace(first, rows=[replace(first.rows[0], key=2)]), Dynamic(3, 3, 8))
    found = repeats.extend(tree, verified_text([4, 5], 99, key=1), Dynamic(3, 3, 8))
    assert paths(found)[0] == {(7,), (7, 50), (7, 8)}


def test_a_follower_that_the_repeat_has_too_is_one_node() -> None:
    repeats, text = Repeats(6), [*PHRASE, 1, *PHRASE[:3]]
    known = after(verified_text(text, 99), [13, 14], [14, 15])
    found = repeats.extend(drawn([-1], [13]), known, Everything(3, 3, 8))
    assert paths(found)[0] == {tuple(range(14, last + 1)) for last in range(14, 20)}


def test_costs_decide_how_many_repeats_are_verified_and_learn_from_all_of_them(target, make_head) -> None:
    """A draft token is worth it if it brings more tokens per second than the rest of the step."""
    growth, costs = CostAware(3, 3, 8, SetCosts()), SetCosts()
    growth.now = costs.of(1)
    seconds = growth.now.verify
    growth.rate = 0.5 / float(seconds[4] - seconds[3])
    assert not growth.is_worth(4, 0.49)
    assert growth.is_worth(4, 0.51)
    growth, seen = CostAware(3, 3, 8, SetCosts()), []
    growth.costs.observe = lambda step, seconds: seen.append(step.nodes - 1)  # type: ignore[method-assign]
    generation = generate(target, [5, 6, 7, 11], 40, LOOP, HeadDrafter(make_head(), growth, Repeats(8)))
    assert sum(seen) == generation.stats.drafted
    assert max(seen) > 3
