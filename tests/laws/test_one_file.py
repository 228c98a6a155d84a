"""The law of examples/one_file.py: without the engine, it writes the engine's tokens."""

import ast
import itertools
import json
from pathlib import Path

import one_file
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headstart import SpeculativeModel

ROOT = Path(__file__).resolve().parents[2]
TARGET, HEAD = ROOT / "assets/demo_target", ROOT / "assets/demo_head"
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Three of the held-out prompts, each [1, seq]."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (TARGET / "heldout_prompts.jsonl").read_text().splitlines()[:3]
    return [tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"] for line in lines]


def test_one_file_writes_the_engines_tokens(model: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    engine = SpeculativeModel.from_folders(TARGET, HEAD, dtype="float32")
    head = one_file.DraftHead.load(HEAD, model)
    for prompt in prompts:
        written = one_file.generate(model, prompt, head=head, max_new_tokens=NEW_TOKENS)
        expected = engine.generate(prompt, max_new_tokens=NEW_TOKENS)
        assert isinstance(expected, torch.Tensor)
        assert written.tolist() == expected.tolist()


def test_one_file_accepts_draft_tokens(model: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    head, steps = one_file.DraftHead.load(HEAD, model), 10
    tokens = sum(
        len(tokens) for prompt in prompts for tokens in itertools.islice(one_file.decode(model, head, prompt), steps)
    )
    assert tokens > 2 * steps * len(prompts)  # about 4 tokens in each pass


def test_one_file_is_a_custom_generate_of_transformers(model: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    """transformers passes every argument of its own `generate`, most of them None."""
    arguments = {"inputs": None, "generation_config": None, "logits_processor": None, "streamer": None}
    prompt = prompts[0]
    written = one_file.generate(
        model=model, input_ids=prompt, attention_mask=torch.ones_like(prompt), head=HEAD, max_new_tokens=8, **arguments
    )
    assert written.shape == (1, prompt.shape[1] + 8)
    with pytest.raises(ValueError, match="do_sample"):
        one_file.generate(model=model, input_ids=prompt, head=HEAD, do_sample=True)


def test_one_file_imports_nothing_of_headstart() -> None:
    nodes = ast.walk(ast.parse((ROOT / "examples/one_file.py").read_text()))
    modules = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "torch" in modules
    assert not [name for name in modules if name.startswith("headstart")]
