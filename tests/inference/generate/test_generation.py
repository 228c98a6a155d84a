"""The law of `generate`: greedy output equals that of transformers' `generate`; unsupported fields raise ValueError."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow_unless
from scripted import Moody
from shared_fixtures import ModelFactory
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from headstart.heads.kinds.checkpoint import save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.inference.core.history import History
from headstart.inference.core.sampling import BatchSampling, Sampling
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import generate
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.settings import IGNORED, SUPPORTED, Settings, read_sampling, read_settings
from headstart.inference.targets.model import TargetModel

INF, PAD, NEW = float("inf"), 96, 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = [[5, 6, 7, 11], [23, 9], [40, 41, 42, 43, 44, 5, 17]]
DEMO = Path(__file__).parents[3] / "assets" / "demo_target"


def left_padded(prompts: list[list[int]], pad: int = PAD) -> dict[str, Any]:
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": tokens, "attention_mask": mask}


BATCH, ALONE = left_padded(PROMPTS), left_padded(PROMPTS[:1])


def written_by(model: Any, **fields: Any) -> Any:
    return model.generate(**fields)


@pytest.fixture(scope="module")
def theirs(make_model: ModelFactory) -> Any:
    return make_model()


@pytest.fixture(scope="module")
def ends(theirs: Any) -> list[int]:
    """Two tokens that end the greedy texts of the first two prompts early when used as end tokens."""
    written = theirs.generate(**BATCH, max_new_tokens=NEW)[:, len(PROMPTS[2]) :].tolist()
    return [written[0][5], written[1][2]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
def model(target: TargetModel, head: Eagle3Head) -> SpeculativeModel:
    return SpeculativeModel(target, HeadDrafter(head, Dynamic(4, 3, 8)))


def same_fields(ends: list[int]) -> dict[str, dict[str, Any]]:
    """Cases in which our greedy output must equal that of transformers: name -> fields."""
    return {
        "no end": {"max_new_tokens": NEW},
        "two end tokens": {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": PAD},
        "end token as padding": {"max_new_tokens": NEW, "eos_token_id": ends},
        "max_length, ends": {"max_length": len(PROMPTS[2]) + 9, "eos_token_id": ends, "pad_token_id": 0},
        "fixed length": {"max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": ends},
        "a least length": {"max_new_tokens": NEW, "min_new_tokens": 7, "eos_token_id": ends, "pad_token_id": PAD},
        "a forced end": {"max_new_tokens": NEW, "forced_eos_token_id": 3, "eos_token_id": [*ends, 3]},
        "no n-gram twice": {"max_new_tokens": 2 * NEW, "no_repeat_ngram_size": 2},
        "bad words": {"max_new_tokens": NEW, "bad_words_ids": [[ends[1]], [7, 11, 12], [11, ends[0]], [23, 9, 40]]},
        "bad words that end": {"max_new_tokens": NEW, "bad_words_ids": [[e] for e in ends], "eos_token_id": ends},
        "suppressed tokens": {"max_new_tokens": NEW, "suppress_tokens": [ends[0], 500]},
        "tokens suppressed at the beginning": {"max_new_tokens": NEW, "begin_suppress_tokens": [*range(50)]},
        "normalised": {"max_new_tokens": NEW, "renormalize_logits": True, "repetition_penalty": 1.2},
        "repetition penalty, ends": {"max_new_tokens": NEW, "repetition_penalty": 0.7, "eos_token_id": ends},
        "bias": {"max_new_tokens": NEW, "sequence_bias": {(ends[0],): -INF, (3,): 2.0}},
    }


SOME_CASES = (
    *("max_length, ends", "a least length", "a forced end", "bad words", "no n-gram twice"),
    *("suppressed tokens", "tokens suppressed at the beginning", "normalised", "bias"),
)


@pytest.fixture(scope="module")
def of_batch(theirs: Any, ends: list[int]) -> Callable[[str], torch.Tensor]:
    """What transformers writes after BATCH in a case."""
    return cache(lambda case: theirs.generate(**BATCH, **same_fields(ends)[case]))


@pytest.mark.each_value
@pytest.mark.parametrize("case", slow_unless(SOME_CASES, same_fields([0, 0])))
@pytest.mark.parametrize("prompts", [BATCH, ALONE], ids=["batch", "alone"])
def test_greedy_output_equals_that_of_transformers(case, prompts, target, model, theirs, of_batch, ends) -> None:
    fields = same_fields(ends)[case]
    wanted = of_batch(case) if prompts is BATCH else theirs.generate(**prompts, **fields)
    width = prompts["input_ids"].shape[1]
    texts = [PROMPTS[row] + written[width:].tolist() for row, written in enumerate(wanted)]
    drafter = None if prompts is ALONE else Moody(*texts)
    assert torch.equal(written_by(SpeculativeModel(target, drafter), **prompts, **fields), wanted)
    assert torch.equal(written_by(model, **prompts, generation_config=GenerationConfig(**fields)), wanted)


def test_the_default_is_twenty_new_tokens_and_max_new_tokens_overrides_max_length(model, theirs) -> None:
    long = {"input_ids": torch.arange(246).unsqueeze(0) % 90}  # 10 positions are left
    for prompts in (ALONE, long):
        with pytest.warns(UserWarning, match="max_new_tokens"):
            assert torch.equal(written_by(model, **prompts), theirs.generate(**prompts))
    with pytest.warns(UserWarning, match="max_length"):
        found = written_by(model, **ALONE, max_new_tokens=4, max_length=50)
    assert torch.equal(found, theirs.generate(**ALONE, max_new_tokens=4))


def test_padding_is_recognised_without_a_mask_or_warned_of_where_it_looks_like_text(model, theirs) -> None:
    """If the pad token is also an end token, it counts as text."""
    said = pytest.warns(UserWarning, match="attention_mask: missing for 3 prompts, .* the pad token 96 is also an end")
    for more in ({}, {"eos_token_id": PAD}):
        fields: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": PAD, "input_ids": BATCH["input_ids"], **more}
        with said if more else nullcontext():
            found = written_by(model, **fields)
        assert torch.equal(found, theirs.generate(**fields))
    fields = {"max_new_tokens": 1, "pad_token_id": PAD, "eos_token_id": PAD}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # a socket of an earlier test
        model.generate(**BATCH, **fields)
        model.generate(ALONE["input_ids"], **fields)  # a single prompt needs no padding
        model.generate(BATCH["input_ids"], max_new_tokens=1, pad_token_id=PAD)


def test_texts_stop_at_the_same_strings_as_in_transformers(target: TargetModel, theirs: Any, tokenizer: Any) -> None:
    free = theirs.generate(**BATCH, max_new_tokens=NEW)[:, len(PROMPTS[2]) :].tolist()
    strings = [tokenizer.decode(free[0][4:7]), tokenizer.decode(free[1][2:4])]
    unused = next(token for token in range(97) if all(token not in text for text in free))
    fields: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": unused, "stop_strings": strings}
    wanted = theirs.generate(**BATCH, **fields, tokenizer=tokenizer)
    assert (wanted == unused).any()
    texts = [prompt + text for prompt, text in zip(PROMPTS, free, strict=True)]
    assert torch.equal(written_by(SpeculativeModel(target, Moody(*texts), tokenizer), **BATCH, **fields), wanted)
    assert torch.equal(written_by(SpeculativeModel(target), **BATCH, **fields, tokenizer=tokenizer), wanted)
    one: dict[str, Any] = {**fields, "stop_strings": strings[0]}
    alone = theirs.generate(**ALONE, **one, tokenizer=tokenizer)
    assert torch.equal(written_by(SpeculativeModel(target, tokenizer=tokenizer), **ALONE, **one), alone)


def test_a_stop_string_may_be_a_special_token_or_begin_with_the_first_new_space(target, theirs, tokenizer) -> None:
    """Tokenizers like that of Llama 2 strip the first space of the text that they decode."""
    name = tokenizer.decode([0])
    assert name in tokenizer.all_special_tokens
    fields: dict[str, Any] = {"max_new_tokens": NEW, "stop_strings": name, "sequence_bias": {(0,): 9.0}}
    wanted = theirs.generate(**ALONE, **fields, tokenizer=tokenizer)
    assert wanted[0, -1] == 0
    assert wanted.shape[1] < len(PROMPTS[0]) + NEW
    assert torch.equal(written_by(SpeculativeModel(target, tokenizer=tokenizer), **ALONE, **fields), wanted)
    pairs = [first + second for first in "wxyz" for second in LETTERS]
    words = ["abcdef", *pairs][:97]  # transformers decodes each token after the text abcdef
    whole_words = Tokenizer(WordLevel({f"\u2581{word}": i for i, word in enumerate(words)}, unk_token="\u2581wa"))
    whole_words.pre_tokenizer, whole_words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole_words, clean_up_tokenization_spaces=False)
    first = theirs.generate(**ALONE, max_new_tokens=1)[0, -1]
    string = " " + tokenizer.decode([first])
    assert tokenizer.decode([first, first]).count(string) == 1
    fields = {"max_new_tokens": NEW, "stop_strings": string}
    wanted = theirs.generate(**ALONE, **fields, tokenizer=tokenizer)
    assert wanted.shape[1] == len(PROMPTS[0]) + 1
    assert torch.equal(written_by(SpeculativeModel(target, tokenizer=tokenizer), **ALONE, **fields), wanted)


SEVERAL: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
# The defaults are those of transformers: with do_sample, top_k is 50.
MEANINGS: list[tuple[dict[str, Any], Sampling]] = [
    ({}, Sampling()),
    ({"do_sample": True}, Sampling(1.0, top_k=50)),
    ({"do_sample": True, "temperature": 0.7, "top_k": 0}, Sampling(0.7)),
    ({"do_sample": True, **SEVERAL}, Sampling(1.0, **SEVERAL)),
    ({"do_sample": True, "sequence_bias": {(4,): 2.0}}, Sampling(1.0, 50, logit_bias=((4, 2.0),))),
    ({"repetition_penalty": 1.3}, Sampling(repetition_penalty=1.3)),
    ({"temperature": 0}, Sampling()),
    # transformers lacks these.
    ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, Sampling(presence_penalty=0.5, frequency_penalty=0.25)),
]


@pytest.mark.parametrize(("fields", "meant"), MEANINGS, ids=[", ".join(fields) for fields, _ in MEANINGS])
def test_fields_mean_what_they_mean_in_transformers(fields: dict[str, Any], meant: Sampling, theirs: Any) -> None:
    assert read_sampling(read_settings(None, fields)) == meant
    assert read_sampling(read_settings(GenerationConfig(**fields), {})) == meant
    if meant.temperature == 0:
        return
    details = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = theirs.generate(**ALONE, max_new_tokens=1, **details, **fields)
    history = History.start(PROMPTS[:1], 97, "cpu")
    scores = BatchSampling([meant], "cpu").scores(found.logits[0].unsqueeze(1), None, history)
    torch.testing.assert_close(scores[:, 0].softmax(-1), found.scores[0].softmax(-1))


def test_none_switches_off_in_the_call_and_keeps_the_default_in_a_configuration(theirs: Any) -> None:
    for config, overrides, top_k in (
        (GenerationConfig(do_sample=True, top_k=None), {}, 50),
        (GenerationConfig(do_sample=True, top_k=7), {"top_k": None}, None),
        (GenerationConfig(do_sample=True), {"top_k": None, "temperature": None, "top_p": None}, None),
    ):
        assert read_sampling(read_settings(config, overrides)) == Sampling(1.0, top_k=top_k)
        details = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        found = theirs.generate(**ALONE, generation_config=config, **details, **overrides)
        assert int(found.scores[0].isfinite().sum()) == (top_k or 97)


def test_sampled_text_depends_only_on_prompt_and_seed(target: TargetModel, model: SpeculativeModel) -> None:
    fields = {"max_new_tokens": 4, "do_sample": True, "top_p": 0.95, "presence_penalty": 0.4}
    sampling = Sampling(1.0, top_k=50, top_p=0.95, presence_penalty=0.4)
    width = len(PROMPTS[2])

    def written(own: SpeculativeModel, **more: Any) -> list[list[int]]:
        return written_by(own, **BATCH, **fields, **more)[:, width:].tolist()

    def alone(prompt: list[int], seed: int) -> list[int]:
        return generate(target, prompt, 4, replace(read_sampling(read_settings(None, fields)), seed=seed)).tokens

    assert read_sampling(read_settings(None, fields)) == sampling
    wanted = {(row, seed): alone(prompt, seed) for row, prompt in enumerate(PROMPTS) for seed in range(4)}
    assert written(model) == [wanted[row, 0] for row in range(3)]
    for own in (model, SpeculativeModel(target, max_batch=2)):
        assert written(own, seed=[3, 1, 2]) == [wanted[0, 3], wanted[1, 1], wanted[2, 2]]
        assert written(own, seed=2, num_return_sequences=2) == [wanted[row, 2 + i] for row in range(3) for i in (0, 1)]
    assert len({tuple(text) for text in wanted.values()}) == len(wanted)


def test_the_detailed_output_agrees_with_transformers(model: SpeculativeModel, theirs: Any, ends: list[int]) -> None:
    fields = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": PAD}
    details = {"output_logits": True, "return_dict_in_generate": True}
    wanted = theirs.generate(**BATCH, **fields, **details)
    found = written_by(model, **BATCH, **fields, **details)
    assert torch.equal(found.sequences, wanted.sequences)
    width, logprobs = len(PROMPTS[2]), torch.stack(wanted.logits, dim=1).log_softmax(-1)  # [batch, new, vocab]
    chosen = logprobs.gather(2, wanted.sequences[:, width:, None]).squeeze(2)
    assert found.logprobs.shape == chosen.shape
    for row, (generation, prompt) in enumerate(zip(found.generations, PROMPTS, strict=True)):
        count = len(generation.tokens)
        assert found.sequences[row, width : width + count].tolist() == generation.tokens
        assert (found.sequences[row, width + count :] == PAD).all()
        assert found.sequences[row, width - len(prompt) : width].tolist() == prompt
        torch.testing.assert_close(found.logprobs[row, :count], chosen[row, :count], atol=1e-4, rtol=1e-4)
        assert not found.logprobs[row, count:].any()
        assert generation.finish == ("end" if generation.tokens[-1] in ends else "length")
    assert found.stats.steps == sum(generation.stats.steps for generation in found.generations)
    assert 0 < max(generation.stats.seconds for generation in found.generations) <= found.stats.seconds
    assert written_by(model, **BATCH, **fields, return_dict_in_generate=True).logprobs is None


class Recorder:
    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def test_a_streamer_gets_what_transformers_gives_and_stream_yields_the_text_in_blocks(target, theirs, ends) -> None:
    cases: list[dict[str, Any]] = [{"max_new_tokens": NEW}, {"max_new_tokens": NEW, "eos_token_id": ends}]
    for fields in cases:
        wanted, found = Recorder(), Recorder()
        written = theirs.generate(**ALONE, **fields, streamer=wanted)
        model = SpeculativeModel(target, Moody(written[0].tolist()))
        assert torch.equal(written_by(model, **ALONE, **fields, streamer=found), written)
        assert found.given == wanted.given
        blocks = list(model.stream(**ALONE, **fields))
        assert PROMPTS[0] + [token for block in blocks for token in block] == written[0].tolist()
        assert 1 < len(blocks) < written.shape[1] - len(PROMPTS[0])


def test_every_other_field_is_refused_unless_it_has_its_default() -> None:
    for name in GenerationConfig().to_dict().keys() - SUPPORTED - IGNORED:
        for value in (7, "x", torch.ones(2)):
            with pytest.raises(ValueError, match=f"{name}: "):
                read_settings(None, {name: value})
    documented = GenerationConfig._get_default_generation_params()
    off = {"temperature": None, "top_p": None, "repetition_penalty": None, "max_length": None, "min_length": None}
    assert read_settings(None, {**documented, **off}) == read_settings(GenerationConfig(), {}) == Settings()
    read_settings(GenerationConfig(**documented), {})
    read_settings(GenerationConfig.from_pretrained(DEMO), {})
    empty: Any = {"logits_processor": [], "stopping_criteria": [], "prefix_allowed_tokens_fn": None}
    read_settings(None, {**empty, "synced_gpus": False})


def test_from_folders_without_a_head_drafts_by_prompt_lookup(target_folder, head, deep_target, tmp_path) -> None:
    """Without one it always failed: the default drafter is a head."""
    save_head(head, tmp_path / "head")
    theirs: Any = deep_target.model
    wanted = theirs.generate(**BATCH, max_new_tokens=NEW)
    for folder in (tmp_path / "head", None):
        model = SpeculativeModel.from_folders(target_folder, folder, device="cpu")
        assert torch.equal(written_by(model, **BATCH, max_new_tokens=NEW), wanted)
        if folder is None:
            assert isinstance(model.drafter, Lookup)
            assert model.speculation is not None
        else:
            assert isinstance(model.drafter, HeadDrafter)
            assert model.drafter.head.embedding.data_ptr() == model.target.frozen.embedding.data_ptr()
