"""The laws of examples/one_file.py: it writes plain generate's texts, and transformers finds it in an exported head."""

import ast
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_file
import pytest
import torch
from exported import exported
from families import make_family
from matrix import slow
from shared_fixtures import HeadFactory
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, StoppingCriteriaList

ROOT = Path(__file__).resolve().parents[2]
TARGET, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Two of the held-out prompts, each [1, seq]."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (TARGET / "heldout_prompts.jsonl").read_text().splitlines()[:2]
    return [tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"] for line in lines]


@pytest.fixture
def folder(make_head: HeadFactory, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of a random head that reads the first layers of a target of width 32 and 97 tokens."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return exported(make_head(taps=(0, 1, 2)), tmp_path, target_folder, "native")


@torch.no_grad()
def test_one_file_accepts_draft_tokens(model: Any, prompts: list[torch.Tensor]) -> None:
    head, steps, tokens = one_file.DraftHead.load(HEAD, model), 6, 0
    for prompt in prompts:
        text = one_file.Text(prompt, LogitsProcessorList(), StoppingCriteriaList(), is_sampled=False)
        *_, length = itertools.islice(one_file.decode(model, text, head, width=4, depth=5), steps)
        tokens += length - prompt.shape[1]
    assert tokens > 2 * steps * len(prompts)  # about 4 tokens in each pass


# gemma2 and gemma3 have sliding windows in some layers, mistral in all, and gpt2 has learned positions.
@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", slow("qwen3"), "gemma3", slow("gemma2"), "mistral", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}, {"do_sample": True, "repetition_penalty": 1.3}],
    ids=["greedy", "sampled", "penalised"],
)
def test_a_custom_generate_writes_plain_generates_tokens(folder: Path, family: str, options: dict[str, Any]) -> None:
    """The drafts of a random head are wide here, so that some are accepted."""
    model, written, random_numbers, passes = make_family(family), [], [], list[None]()
    prompt = torch.randint(1, 97, (1, 9))
    drafts = {"custom_generate": str(folder), "trust_remote_code": True, "draft_width": 24, "draft_depth": 3}
    model.register_forward_pre_hook(lambda *_: passes.append(None))
    for more in ({}, drafts):
        torch.manual_seed(5)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        text = model.generate(**inputs, max_new_tokens=14, **options, **more)
        written.append(text.tolist())
        random_numbers.append(torch.rand(1).item())
    assert written[0] == written[1]
    assert random_numbers[0] == random_numbers[1]  # the next text goes on with the same ones
    assert len(passes) < 14 + 14  # some drafts were right


def test_a_custom_generate_writes_stops_and_streams_as_plain_generate(model: Any, prompts: list[torch.Tensor]) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "inputs": prompts[0]}
    last, short = int(model.generate(**options)[0, -3]), {"max_new_tokens": None, "max_length": prompts[0].shape[1] + 5}
    for more in ({"eos_token_id": last}, short, {"inputs": prompts[1]}):
        streamed: list[torch.Tensor] = []
        streamer = SimpleNamespace(put=streamed.append, end=lambda: None)
        expected = model.generate(**{**options, **more})
        assert one_file.generate(model, HEAD, streamer=streamer, **{**options, **more}).tolist() == expected.tolist()
        assert torch.cat([each.flatten() for each in streamed]).tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"inputs": torch.ones(2, 4, dtype=torch.long)}, "2 texts"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "attention_mask"),
        ({"num_beams": 2}, "beam_search"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"past_key_values": "a cache"}, "past_key_values"),
    ],
)
def test_a_custom_generate_names_what_it_does_not_support(model, wrong, named) -> None:
    arguments = {"inputs": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 4, **wrong}
    with pytest.raises(ValueError, match=named):
        one_file.generate(model, HEAD, **arguments)


def test_a_custom_generate_names_a_head_of_another_target_and_layers_that_it_cannot_mask(model, folder) -> None:
    with pytest.raises(ValueError, match="hidden size 32; this one has"):
        one_file.generate(model, folder, inputs=torch.ones(1, 4, dtype=torch.long), max_new_tokens=4)
    with pytest.raises(ValueError, match="linear_attention given"):
        one_file.generate(make_family("qwen3_next"), folder, inputs=torch.ones(1, 4, dtype=torch.long))


def test_one_file_imports_nothing_of_headstart() -> None:
    nodes = ast.walk(ast.parse((ROOT / "examples/one_file.py").read_text()))
    modules = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("headstart")]
