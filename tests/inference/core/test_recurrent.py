"""Laws of targets that keep more than slots: states that cannot be cut back, and layers of several shapes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import OTHERS, STATEFUL, make_family
from matrix import slow_unless
from scripted import Hidden, Moody, NoThirds, Oracle, answered, finish
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, RwkvConfig, RwkvForCausalLM

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.recurrent import WINDOW
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import build_drafter
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import DecodeLoop, generate, generate_batch
from headstart.inference.engine.prefixes import BLOCK
from headstart.inference.targets import check, passes
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection

PROMPTS = [[(7 * place + 3 * row) % 97 for place in range(count)] for row, count in enumerate((5, 20, 9))]
NEW = 6
KINDS = [*STATEFUL, "own cache"]


@pytest.fixture(scope="module", params=KINDS)
def stateful(request: pytest.FixtureRequest) -> TargetModel:
    if request.param != "own cache":
        target = TargetModel(make_family(request.param), ())
        assert target.passes.method == "chains"
        return target
    with pytest.MonkeyPatch.context() as patch:  # no other way of decoding passes its check
        patch.setattr(check, "KNOWN_METHODS", {})
        for method in ("chains", "plain"):
            patch.setitem(check.TRIALS, method, lambda *_: iter([("", torch.zeros(1, 1), range(1))]))
        target = TargetModel(make_family("qwen3_next"), ())
    assert target.passes.method == "own cache"
    return target


def requests(temperature: float = 0.0, **fields: Any) -> list[Request]:
    return [Request(prompt, NEW, Sampling(temperature, seed=row), **fields) for row, prompt in enumerate(PROMPTS)]


def texts(target: TargetModel, asked: list[Request]) -> list[list[int]]:
    return [[*each.prompt, *plain(target, tuple(each.prompt), each.sampling)] for each in asked]


def of_transformers(target: TargetModel) -> list[list[int]]:
    return [[*prompt, *target.generate([prompt], NEW)[0]] for prompt in PROMPTS]


def in_a_batch(target: TargetModel, drafter: Drafter, temperature: float = 0.0) -> list[list[int]]:
    found = generate_batch(target, requests(temperature), drafter, 2)
    return [[*prompt, *each.tokens] for prompt, each in zip(PROMPTS, found, strict=True)]


@functools.cache
def plain(target: TargetModel, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    return generate(target, list(prompt), NEW, sampling).tokens


def counting(counts: list[int]) -> Callable[..., Any]:
    """`Passes._run`, which adds the number of tokens of each pass to the list."""
    run = passes.Passes._run

    def counted(self: Any, tokens: Any, *rest: Any, **options: Any) -> Any:
        counts.append(tokens.shape[1])
        return run(self, tokens, *rest, **options)

    return counted


@pytest.mark.parametrize("stateful", slow_unless(("qwen3_next", "own cache"), KINDS), indirect=True)
def test_texts_are_those_of_transformers_and_drafts_change_none(stateful: TargetModel) -> None:
    """Alone, and in a batch whose rows accept different numbers, so that their windows differ in length."""
    wanted = texts(stateful, requests())
    assert wanted == of_transformers(stateful)
    alone = generate(stateful, PROMPTS[1], NEW, drafter=Hidden(*wanted))
    assert [*PROMPTS[1], *alone.tokens] == wanted[1]
    wanted = texts(stateful, requests(1.0))
    assert in_a_batch(stateful, Moody(*wanted), 1.0) == wanted


@pytest.mark.slow
def test_constraints_penalties_and_lookups_change_no_text(stateful: TargetModel) -> None:
    """Rows whose tokens are restricted share a batch with others; drafts come from what the texts repeat."""
    asked = [
        Request([*PROMPTS[0], *PROMPTS[0]], NEW, Sampling(repetition_penalty=0.8)),  # so that it repeats something
        Request(PROMPTS[1], NEW, Sampling(1.0, seed=2), constraint=NoThirds()),
        Request(PROMPTS[2], NEW, Sampling(0.8, top_p=0.9, seed=3), speculative=False),
    ]
    drafter = Lookup(Growth(depth=4, width=2, nodes=8))
    together = generate_batch(stateful, asked, drafter, 3)
    assert [each.tokens for each in together] == [generate_batch(stateful, [each])[0].tokens for each in asked]
    assert together[0].stats.drafted


@pytest.mark.parametrize("name", [*OTHERS, "jamba"])
def test_layers_of_several_shapes_verify_trees_and_others_decode_plainly(name: str) -> None:
    """Keys wider than values, and chunked attention, whose chunk the texts are longer than. Jamba's passes do not go on
    from its states: its rows share their steps, a drafter given to the loop is not asked, one of a recipe is refused.
    """
    target = TargetModel(make_family(name), ())
    assert target.passes.method == ("plain" if name == "jamba" else "trees")
    wanted = texts(target, requests())
    assert wanted == of_transformers(target)
    assert in_a_batch(target, Hidden(*wanted)) == wanted
    if name == "jamba":
        with pytest.raises(ValueError, match="prompt_lookup given, but a 'jamba' target takes no drafts"):
            build_drafter(DecodeSection(drafter="prompt_lookup"), target, TargetSection(path="jamba", dtype="float32"))


def test_a_rejection_costs_no_pass_until_the_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    target, counts = TargetModel(make_family("qwen3_next"), ()), list[int]()

    class HalfRight(Oracle):
        def continuation(self, prefix: list[int], remaining: int) -> list[int]:
            right = super().continuation(prefix, remaining)[:2]
            return [*right[:1], *((token + 1) % 97 for token in right[1:])]

    (text, *_) = texts(target, requests()[:1])
    monkeypatch.setattr(passes.Passes, "_run", counting(counts))
    generate(target, PROMPTS[0], NEW, drafter=HalfRight(text))
    assert counts[0] == len(PROMPTS[0])
    in_a_window = [*range(3, WINDOW + 2, 2), WINDOW + 1]
    assert counts[1 : 1 + len(in_a_window)] == in_a_window
    assert max(counts[1:]) == WINDOW + 1


@pytest.mark.parametrize("stateful", slow_unless(("own cache",), KINDS), indirect=True)
def test_prompts_may_be_read_in_chunks_and_cancelled(stateful: TargetModel) -> None:
    asked = requests(1.0)
    wanted = texts(stateful, asked)
    loop = DecodeLoop(stateful, Moody(*wanted), 2, prefill_chunk=7)
    numbers = [loop.submit(each) for each in [*asked, asked[1]]]
    for _ in range(9):
        loop.step()
    loop.cancel(numbers[0])
    finish(loop)
    for number, text in list(zip(numbers, [*wanted, wanted[1]], strict=True))[1:]:
        assert text[-NEW:] == loop.generations[number].tokens


@pytest.mark.parametrize("stateful", slow_unless(("qwen3_next", "lfm2"), KINDS), indirect=True)
def test_a_chat_is_read_from_where_its_last_answer_ended(stateful: TargetModel) -> None:
    """The states at the end of an answer are kept, up to a window before it."""
    loop, prompt = DecodeLoop(stateful, prefix_memory=2**20), PROMPTS[1]
    for turn in range(3):
        found = answered(loop, Request(prompt, 8))
        assert found.tokens == generate(stateful, prompt, 8).tokens
        assert found.cached_tokens == (0 if turn == 0 else len(prompt) - 4)
        prompt = [*prompt, *found.tokens, 3, 4, 5]


@pytest.mark.parametrize("stateful", slow_unless(("falcon_h1", "own cache"), KINDS), indirect=True)
def test_prompts_that_begin_alike_share_states_from_the_second_on(stateful: TargetModel) -> None:
    """The second one is read in two parts, so that the third finds the states at the end of what they share."""
    loop, shared = DecodeLoop(stateful, prefix_memory=2**20), PROMPTS[1] * 2
    for number in range(3):
        prompt = [*shared, *range(60 + number, 70)]
        found = answered(loop, Request(prompt, 5))
        assert found.tokens == generate(stateful, prompt, 5).tokens
        assert found.cached_tokens == (0 if number < 2 else len(shared) // BLOCK * BLOCK)


@pytest.mark.parametrize("stateful", slow_unless(("qwen3_next", "lfm2"), KINDS), indirect=True)
def test_a_prompt_that_comes_again_is_read_from_its_last_message_on_in_one_pass(stateful, monkeypatch) -> None:
    """With another question after 1,000 tokens, 72 were read in two passes, which took 0.29 of the first time."""
    monkeypatch.setattr(stateful, "end_tokens", [96])
    loop, counts = DecodeLoop(stateful, prefix_memory=2**22), list[int]()
    monkeypatch.setattr(passes.Passes, "_run", counting(counts))
    for number, question in enumerate(([3, 4, 5, 6], [7], [7])):
        prompt = [*((7 * place) % 89 for place in range(205)), 96, 90, *question, 96, 91]
        found = loop.generations[loop.submit(Request(prompt, 5))]
        counts.clear()
        while not loop.step():
            pass
        assert counts == ([206, 7] if number == 0 else [4])
        finish(loop)
        assert found.tokens == generate(stateful, prompt, 5).tokens


def test_a_target_with_states_gets_the_chain_of_a_recipe_that_asks_for_a_tree(capfd) -> None:
    target = TargetModel(make_family("lfm2"), ())
    section = DecodeSection(drafter="prompt_lookup", growth="dynamic")
    source = TargetSection(path="lfm2", dtype="float32")
    drafter = build_drafter(section, target, source)
    assert isinstance(drafter, Lookup)
    assert drafter.growth.width == 1
    said = "decode.growth: chain in place of dynamic: a 'lfm2' target verifies chains, as it keeps recurrent states"
    assert said in capfd.readouterr().err


def reads_in_both_directions() -> Any:
    """It wrote another text in silence: a prompt that is read in two passes differs from one that is read in one."""
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PaliGemmaConfig(
        text_config={"model_type": "gemma", "num_attention_heads": 4, "num_key_value_heads": 2, **text},
        vision_config={"image_size": 28, "patch_size": 14, **vision},
        image_token_index=96,
        projection_dim=32,
    )
    return PaliGemmaForConditionalGeneration(config).eval()


def computes_a_step_of_one_token_otherwise() -> Any:
    """Zamba2 wrote another text: its pass over several tokens bounds their time steps, and that of one token does not.
    GIT crashed in its first step without drafts."""
    model = make_family("falcon_h1")
    for layer in model.model.layers:
        layer.mamba.time_step_limit = (1.0, float("inf"))
    return model


def has_a_state_that_is_no_cache() -> Any:
    config = RwkvConfig(vocab_size=97, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    config.num_attention_heads, config.max_position_embeddings = 1, 256
    return RwkvForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (reads_in_both_directions, "trees: "),
        (computes_a_step_of_one_token_otherwise, "chains: one token of one row differs"),
        (has_a_state_that_is_no_cache, "own cache: "),
    ],
)
def test_a_model_whose_passes_do_not_continue_its_own_text_is_refused(make, said, monkeypatch) -> None:
    monkeypatch.setattr(check, "KNOWN_METHODS", {})
    with pytest.raises(ValueError, match=rf"model given, whose passes do not continue its own text: .*{said}"):
        TargetModel(make(), ())
