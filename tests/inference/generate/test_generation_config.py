"""Laws of a target's generation_config.json: `generate` reads it as transformers does, and all else reads it alike."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import slow_unless
from server_run import NAME, load_served, running, without
from tiny_run import build_run, tiny_recipe
from transformers import AutoModelForCausalLM, GenerationConfig

from headstart.data_pipelines.prompts.responses import target_writer
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.generate.settings import ONLY_WHEN_SAMPLING
from headstart.inference.serve.options import ServerSettings
from headstart.inference.targets.model import TargetModel, end_tokens, pad_token
from headstart.inference.targets.tokenizer import visible_text_of

DEMO = Path(__file__).parents[3] / "assets/demo_target"
# def main(self, path):\n    return
CODE = [316, 499, 262, 8, 274, 12, 643, 300, 272, 331]
SCORE, DOT = 63, 14  # an underscore and a dot, of which the greedy texts have several
NEW = 10


class Demo:
    """Four layers of the demo target with a folder's generation_config.json: as transformers' model, and as ours."""

    def __init__(self) -> None:
        load: Any = partial(AutoModelForCausalLM.from_pretrained, DEMO, dtype=torch.float32, num_hidden_layers=4)
        self.theirs, self.target = load(), TargetModel(load(), ())
        self.theirs.generation_config = GenerationConfig()
        self.without_file = self.theirs.generate(**prompts(**SHORT)).tolist()
        self.drafter = Lookup(Growth(3, 2, 6), ngram=1)

    def reading(self, folder: Path) -> tuple[Any, SpeculativeModel]:
        read = GenerationConfig.from_pretrained(folder)
        self.theirs.generation_config = self.target.generation_config = read
        self.target.end_tokens, self.target.pad_token = end_tokens(read, self.theirs.config), pad_token(self.theirs)
        return self.theirs, SpeculativeModel(self.target, self.drafter)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


def say(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "generation_config.json"
    folder.mkdir(parents=True, exist_ok=True)
    own = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**own, **fields}))
    return folder


def prompts(**fields: Any) -> dict[str, Any]:
    texts = torch.tensor([CODE, [0] * 6 + CODE[:4]])
    return {"input_ids": texts, "attention_mask": torch.tensor([[1] * 10, [0] * 6 + [1] * 4]), **fields}


SHORT = {"max_new_tokens": NEW, "pad_token_id": 0}
NO_TRIGRAM_TWICE = GenerationConfig(no_repeat_ngram_size=3)
# What the file says, and the call. Each is another text than without the file.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n-grams": ({**SHORT, "no_repeat_ngram_size": 2}, {}),
    "the longest text and prompt": ({"max_length": 25, "pad_token_id": 0}, {}),
    "a length that the call replaces": ({"max_length": 11, "repetition_penalty": 1.3}, {"max_new_tokens": NEW}),
    "an older end token": ({**SHORT, "eos_token_id": [SCORE, 1000]}, {}),
    "a forced end": ({**SHORT, "forced_eos_token_id": 0, "max_new_tokens": 8}, {}),
    "a configuration beside it": ({**SHORT, "repetition_penalty": 1.3}, {"generation_config": NO_TRIGRAM_TWICE}),
    "a call that switches some off": (
        {**SHORT, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "typical_p": 0.5, "do_sample": True},
        {"repetition_penalty": None, "do_sample": False},
    ),
    "fields without effect": (
        {
            **{**SHORT, "repetition_penalty": 1.3, "temperature": 0.6, "top_p": 0.9, "typical_p": 0.5, "min_p": 0.1},
            **{"length_penalty": 0.8, "early_stopping": True, "chat_format": "chatml", "num_assistant_tokens": 5},
            **{"use_cache": False, "decoder_start_token_id": 0, "epsilon_cutoff": 1e-3, "num_beams": 1},
        },
        {},
    ),
}

SOME_FILES = "n-grams", "the longest text and prompt", "a call that switches some off"


@pytest.mark.parametrize("case", slow_unless(SOME_FILES, FILES))
def test_the_file_of_the_target_applies_as_in_transformers(case: str, demo: Demo, tmp_path: Path) -> None:
    own, call = FILES[case]
    theirs, model = demo.reading(say(tmp_path, own))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = theirs.generate(**prompts(**call))
        found: Any = model.generate(**prompts(**call))
    assert torch.equal(found, wanted)
    assert wanted.tolist() != demo.without_file


SAMPLING: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "no_repeat_ngram_size": 2},
    "all at once": {
        **{"do_sample": True, "temperature": 1.4, "top_k": 40, "repetition_penalty": 1.2, "bad_words_ids": [[SCORE]]},
        **{"min_new_tokens": 5, "forced_eos_token_id": 0, "renormalize_logits": True, "suppress_tokens": [DOT]},
    },
    "greedy": {"eos_token_id": [SCORE, DOT], "repetition_penalty": 1.2, "begin_suppress_tokens": [287]},
}


@pytest.mark.parametrize("case", slow_unless(("sampling", "all at once"), SAMPLING))
def test_scores_are_those_of_transformers_at_every_token_of_a_text(case, demo, tmp_path, monkeypatch) -> None:
    theirs, model = demo.reading(say(tmp_path, {**SAMPLING[case], "max_new_tokens": 8, "pad_token_id": 0}))
    details = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(**prompts(**details), seed=4)
    ours = iter(found.sequences[:, len(CODE) :].T)
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: next(ours).unsqueeze(1))  # their draws are ours
    wanted = theirs.generate(**prompts(**details))
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.scores) == len(found.logits) == len(wanted.scores) > 1
    for row, generation in enumerate(found.generations):
        for mine, its in ((found.scores, wanted.scores), (found.logits, wanted.logits)):
            for place in range(len(generation.tokens)):
                # Without token 0, the padding of a prompt, which transformers 5.17 penalises.
                torch.testing.assert_close(mine[place][row, 1:], its[place][row, 1:], atol=1e-4, rtol=1e-4)
            assert all(not late[row].any() for late in mine[len(generation.tokens) :])


# Unsupported fields, supported fields with a wrong value, and strings, which need a tokenizer.
REFUSED = {
    **{"num_beams": 4, "exponential_decay_length_penalty": [5, 1.5], "sequence_bias": [[[5, 6], -1.0]]},
    **{"repetition_penalty": -1.0, "bad_words_ids": [[5000]], "stop_strings": "x", "cache_implementation": "quantized"},
}


def test_what_is_not_supported_is_refused_by_name_and_not_blamed_on_the_call(demo: Demo, tmp_path: Path) -> None:
    for name, value in REFUSED.items():
        _, model = demo.reading(say(tmp_path / "refused" / name, {name: value}))
        with pytest.raises(ValueError, match=name):
            model.generate(**prompts(**SHORT))
        with pytest.raises(ValueError, match=f"^the target's generation_config.json: {name}"):
            TargetDefaults.of(model.target)
    wrong = {"max_length": 2, "forced_eos_token_id": 10**6, "bad_words_ids": [[10**6]]}
    for name, value in wrong.items():
        _, model = demo.reading(say(tmp_path / name, {name: value}))
        with pytest.raises(ValueError, match=f"^the target's generation_config.json: {name}: .*override it"):
            model.generate(**prompts(**{**SHORT, "max_new_tokens": None if name == "max_length" else 2}))
        with pytest.raises(ValueError, match=f"^{name}"):
            model.generate(**prompts(**{**SHORT, "max_new_tokens": None, name: value}))


def test_truncation_that_is_not_supported_is_refused_where_text_may_be_sampled(demo: Demo, tmp_path: Path) -> None:
    one = {**SHORT, "max_new_tokens": 1}
    _, model = demo.reading(say(tmp_path, dict.fromkeys(ONLY_WHEN_SAMPLING, 0.5)))
    model.generate(**prompts(**one))
    model.generate(**prompts(**one, do_sample=True, **dict.fromkeys(ONLY_WHEN_SAMPLING)))
    for name in ONLY_WHEN_SAMPLING:
        others = dict.fromkeys(ONLY_WHEN_SAMPLING - {name})
        with pytest.raises(ValueError, match=f"generation_config.json: {name}: 0.5 given.*override it"):
            model.generate(**prompts(**one, do_sample=True, **others))
        with pytest.raises(ValueError, match=name):
            TargetDefaults.of(model.target)


OWN = {
    **{"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    **{"bad_words_ids": [[11], [12, 13]], "begin_suppress_tokens": [20, 21], "min_new_tokens": 4, "do_sample": True},
}


def test_server_and_harvest_write_what_generate_writes(tmp_path: Path) -> None:
    build_run(tmp_path)
    say(tmp_path / "target", {**OWN, "max_new_tokens": 12})
    served, recipe = load_served(tmp_path / "target"), tiny_recipe(tmp_path, "data.response_tokens=12")
    model, prompt, texts = SpeculativeModel(served.target), [5, 6, 7, 12], {}
    for seed in range(2):
        ids = torch.tensor([prompt])
        for temperature in (0.8, 0.3):
            found: Any = model.generate(ids, seed=seed, temperature=temperature, pad_token_id=0)
            texts[seed, temperature] = found[0, len(prompt) :].tolist()
        plain = [Request(prompt, 12, Sampling(0.8, seed=seed))]
        assert generate_batch(served.target, plain)[0].tokens != texts[seed, 0.8]
    with running(served, ServerSettings((NAME,), max_batch=4)) as server:
        ask = {"model": NAME, "prompt": prompt, "stream": False}
        for (seed, temperature), wanted in texts.items():
            given = {"seed": seed, **({} if temperature == 0.8 else {"temperature": temperature})}
            answer = server.http.post("/v1/completions", json={**ask, **given}).json()
            assert answer["usage"]["completion_tokens"] == len(wanted)
            assert answer["choices"][0]["text"] == visible_text_of(served.tokenizer, without(wanted))
    samplings = [Sampling(temperature, seed=seed) for seed, temperature in texts]
    written = dict(target_writer(recipe, served.target)([{"tokens": prompt}] * len(texts), samplings))
    assert [written[place] for place in range(len(texts))] == [*texts.values()]
