"""Table of bad inputs to the Python API: the ValueError names the argument, its value, what is allowed, what to do."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import numpy
import pytest
import torch
import yaml
from bad_inputs import Says, assert_raises
from exported import edit_config
from safetensors.torch import load_file, save_file
from tiny_run import build_tokenizer, recipe_values
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

import headstart
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import load_head_for, save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection

INF, NAN = float("inf"), float("nan")
IDS = torch.tensor([[5, 6, 7, 11]])
TWO = torch.tensor([[0, 5, 6], [7, 8, 9]])
SAMPLE = {"do_sample": True}


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Users have no shape checks, which would refuse some of these inputs before our code sees them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def target(deep_target: TargetModel) -> TargetModel:
    return deep_target


@pytest.fixture(scope="module")
def model(target: TargetModel, head: Eagle3Head) -> SpeculativeModel:
    return SpeculativeModel(target, HeadDrafter(head, Dynamic(2, 2, 4)))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


# The symptom, the fields of a call of generate that otherwise would be right, and what the message must say.
GENERATE: dict[str, tuple[dict[str, Any], Says]] = {
    "ids beyond the vocabulary": (
        {"input_ids": torch.tensor([[5, 97]])},
        Says("input_ids", "97", "0 to 96 is allowed", "the target's own tokenizer"),
    ),
    "negative ids": ({"input_ids": torch.tensor([[5, -1]])}, Says("input_ids", "-1", "0 to 96", "attention_mask")),
    "ids as floats": ({"input_ids": IDS.float()}, Says("input_ids", "float32", "torch.long", "a tokenizer returns")),
    "ids as bools": ({"input_ids": IDS.bool()}, Says("input_ids", "bool", "torch.long", "a tokenizer returns")),
    "ids as nested lists": (
        {"input_ids": [[5, 6]]},
        Says("input_ids", "list [[5, 6]]", "a torch tensor is allowed", "write torch.tensor("),
    ),
    "ids as a flat list": ({"input_ids": [5, 6]}, Says("input_ids", "[5, 6]", "a torch tensor", "torch.tensor([[")),
    "ids as a numpy array": (
        {"input_ids": numpy.array([[5]])},
        Says("input_ids", "ndarray", "a torch tensor", "write"),
    ),
    "text in place of ids": (
        {"input_ids": "hello"},
        Says("input_ids", "'hello'", "a torch tensor", "tokenize the text"),
    ),
    "texts in place of ids": (
        {"input_ids": ["a", "b"]},
        Says("input_ids", "['a', 'b']", "a torch", "tokenize the text"),
    ),
    "a tokenizer's output in one piece": (
        {"input_ids": {"input_ids": IDS}},
        Says("input_ids", "dict", "a torch tensor", "unpack a tokenizer's output with **"),
    ),
    "no ids": ({"input_ids": None}, Says("input_ids: missing", "", "[batch, seq]", "generate(**tokenizer(")),
    "ids of one axis": (
        {"input_ids": IDS[0]},
        Says("input_ids", "shape [4]", "[batch, seq]", "use input_ids.unsqueeze(0)"),
    ),
    "ids of three axes": (
        {"input_ids": IDS[None]},
        Says("input_ids", "shape [1, 1, 4]", "[batch, seq]", "give prompts"),
    ),
    "ids without an axis": (
        {"input_ids": torch.tensor(5)},
        Says("input_ids", "shape []", "[batch, seq]", "give prompts"),
    ),
    "no prompts": ({"input_ids": IDS[:0]}, Says("input_ids", "shape [0, 4]", "at least one row", "give prompts")),
    "empty prompts": ({"input_ids": IDS[:, :0]}, Says("input_ids", "shape [1, 0]", "one column", "give prompts")),
    "a prompt that is too long": (
        {"input_ids": torch.full((1, 300), 5)},
        Says("max_new_tokens", "300 tokens", "256 positions", "shorten the prompt"),
    ),
    "inputs_embeds": (
        {"inputs_embeds": torch.zeros(1, 4, 32)},
        Says("inputs_embeds", "tensor", "None is allowed", "leave out unsupported fields"),
    ),
    "a mask of another shape": (
        {"attention_mask": torch.ones(1, 2)},
        Says("attention_mask", "shape [1, 2]", "[1, 4] is allowed", "that the tokenizer returned"),
    ),
    "a mask of one axis": (
        {"attention_mask": torch.ones(4)},
        Says("attention_mask", "shape [4]", "[1, 4]", "tokenizer"),
    ),
    "a mask as a list": (
        {"attention_mask": [[1, 1, 1, 1]]},
        Says("attention_mask", "list [[1, 1, 1, 1]]", "a torch tensor", "write torch.tensor("),
    ),
    "a mask as text": ({"attention_mask": "1111"}, Says("attention_mask", "'1111'", "a torch tensor", "write torch")),
    "a mask of twos": (
        {"attention_mask": torch.full((1, 4), 2)},
        Says("attention_mask", "[2]", "0 (padding)", "tokenizer"),
    ),
    "a mask of NaN": (
        {"attention_mask": torch.full((1, 4), NAN)},
        Says("attention_mask", "nan", "only 0", "tokenizer's"),
    ),
    "an additive mask": (
        {"attention_mask": torch.tensor([[-INF, 0.0, 0.0, 0.0]])},
        Says("attention_mask", "-inf", "0 (padding) and 1 (text)", "pass the tokenizer's mask"),
    ),
    "a mask without text": (
        {"attention_mask": torch.zeros(1, 4)},
        Says("input_ids", "prompt 1 of 1 has no tokens but padding", "at least one", "leave empty prompts out"),
    ),
    "padding on the right": (
        {"attention_mask": torch.tensor([[1, 1, 1, 0]])},
        Says("input_ids", "prompt 1 of 1", "padding is allowed on the left", "padding_side='left'"),
    ),
    "padding on the right without a mask": (
        {"input_ids": TWO.flip(1), "pad_token_id": 0},
        Says("input_ids", "prompt 1 of 2", "on the left only", "padding_side='left'"),
    ),
    "a configuration as a dict": (
        {"generation_config": {"max_new_tokens": 3}},
        Says("generation_config", "{'max_new_tokens': 3}", "a GenerationConfig", "GenerationConfig(**fields)"),
    ),
    "a configuration as text": (
        {"generation_config": "x"},
        Says("generation_config", "'x'", "a GenerationConfig", "write"),
    ),
    "a configuration class": (
        {"generation_config": GenerationConfig},
        Says("generation_config", "rationConfig'>", "a GenerationConfig", "GenerationConfig(**fields)"),
    ),
    "a misspelt field": (
        {"max_new_token": 3},
        Says("max_new_token", "3", "supported fields", "did you mean max_new_tokens?"),
    ),
    "an unsupported field": ({"num_beams": 4}, Says("num_beams", "4", "1 is allowed", "leave out unsupported fields")),
    "two mistakes at once": (
        {"top_k": "5", "num_beams": 4},
        Says("top_k: '5'", "num_beams: 4", "a whole number", "leave"),
    ),
    "stop strings as a number": (
        {"stop_strings": 3, "tokenizer": "ours"},
        Says("stop_strings", "3", "a text or a list of texts", "leave it out"),
    ),
    "stop strings of numbers": ({"stop_strings": [3]}, Says("stop_strings", "[3]", "a list of texts", "leave it out")),
    "no stop strings": ({"stop_strings": []}, Says("stop_strings", "[]", "not empty", "leave it out")),
    "an empty stop string": ({"stop_strings": ""}, Says("stop_strings", "''", "not empty", "leave it out")),
    "stop strings as bytes": ({"stop_strings": b"x"}, Says("stop_strings", "b'x'", "a text or a list", "leave it out")),
    "stop strings without a tokenizer": (
        {"stop_strings": "x"},
        Says("stop_strings", "without a tokenizer", "", "pass a tokenizer"),
    ),
    "temperature NaN": ({**SAMPLE, "temperature": NAN}, Says("temperature", "nan", "0 to 100", "leave it out")),
    "negative temperature": ({**SAMPLE, "temperature": -1}, Says("temperature", "-1", "0 to 100", "leave it out")),
    "infinite temperature": (
        {**SAMPLE, "temperature": INF},
        Says("temperature", "inf", "0 to 100", "leave it out"),
    ),
    "temperature 0 with sampling": (
        {**SAMPLE, "temperature": 0},
        Says("temperature", "0", "more than 0", "do_sample=False"),
    ),
    "temperature as text": (
        {**SAMPLE, "temperature": "0.7"},
        Says("temperature", "'0.7'", "one number", "without quotes"),
    ),
    "temperature as a list": ({**SAMPLE, "temperature": [0.7]}, Says("temperature", "[0.7]", "one number", "brackets")),
    "temperature as a bool": ({**SAMPLE, "temperature": True}, Says("temperature", "True", "one number", "write it")),
    "a temperature for each row": (
        {**SAMPLE, "temperature": torch.tensor([0.5, 0.7])},
        Says("temperature", "tensor([0.5", "one number", "write it"),
    ),
    "temperature without sampling": (
        {"temperature": 0.7},
        Says("temperature", "0.7", "needs do_sample=True", "leave temperature out"),
    ),
    "top_k as a float": ({**SAMPLE, "top_k": 5.5}, Says("top_k", "5.5", "a whole number", "without a point")),
    "top_k as text": ({**SAMPLE, "top_k": "5"}, Says("top_k", "'5'", "a whole number", "without a point or quotes")),
    "top_k as a bool": ({**SAMPLE, "top_k": True}, Says("top_k", "True", "a whole number", "write it as a number")),
    "negative top_k": ({**SAMPLE, "top_k": -2}, Says("top_k", "-2", "at least -1", "leave it out")),
    "top_p above 1": ({**SAMPLE, "top_p": 2}, Says("top_p", "2", "at most 1", "leave it out")),
    "top_p NaN": ({**SAMPLE, "top_p": NAN}, Says("top_p", "nan", "above 0", "leave it out")),
    "negative min_p": ({**SAMPLE, "min_p": -0.1}, Says("min_p", "-0.1", "0 to 1", "leave it out")),
    "min_p as text": ({**SAMPLE, "min_p": "low"}, Says("min_p", "'low'", "one number", "without quotes")),
    "repetition penalty 0": ({"repetition_penalty": 0}, Says("repetition_penalty", "0", "above 0", "leave it out")),
    "repetition penalty NaN": ({"repetition_penalty": NAN}, Says("repetition_penalty", "nan", "above 0", "leave")),
    "presence penalty of 3": ({"presence_penalty": 3}, Says("presence_penalty", "3", "-2 to 2", "leave it out")),
    "frequency penalty as text": (
        {"frequency_penalty": "x"},
        Says("frequency_penalty", "'x'", "one number", "without"),
    ),
    "do_sample as text": ({"do_sample": "yes"}, Says("do_sample", "'yes'", "True or False", "write one of them")),
    "do_sample for each row": (
        {"do_sample": torch.tensor([1, 0])},
        Says("do_sample", "tensor", "True or False", "write"),
    ),
    "return_dict as text": (
        {"return_dict_in_generate": "yes"},
        Says("return_dict_in_generate", "'yes'", "True or False", "write one of them"),
    ),
    "scores without a dict": (
        {"output_scores": True},
        Says("output_scores", "True", "return_dict_in_generate", "set it"),
    ),
    "no new tokens": ({"max_new_tokens": 0}, Says("max_new_tokens", "0", "1 or more", "raise it")),
    "a negative number of new tokens": (
        {"max_new_tokens": -1},
        Says("max_new_tokens", "-1", "1 or more is allowed", "raise it"),
    ),
    "new tokens as a float": (
        {"max_new_tokens": 3.0},
        Says("max_new_tokens", "3.0", "a whole number", "without a point"),
    ),
    "new tokens as text": ({"max_new_tokens": "3"}, Says("max_new_tokens", "'3'", "a whole number", "or quotes")),
    "new tokens as a bool": ({"max_new_tokens": True}, Says("max_new_tokens", "True", "a whole number", "as a number")),
    "a billion new tokens": (
        {"max_new_tokens": 10**9},
        Says("max_new_tokens", "1000000000", "up to 252 new tokens are allowed", "lower max_new_tokens, or shorten"),
    ),
    "max_length within the prompt": (
        {"max_new_tokens": None, "max_length": 2},
        Says("max_length", "2", "more than the 4 columns", "give max_new_tokens"),
    ),
    "max_length as text": ({"max_length": "2"}, Says("max_length", "'2'", "a whole number", "without")),
    "min_new_tokens as text": ({"min_new_tokens": "2"}, Says("min_new_tokens", "'2'", "a whole number", "without")),
    "negative min_new_tokens": ({"min_new_tokens": -1}, Says("min_new_tokens", "-1", "0 or more", "leave it out")),
    "min_length as a list": ({"min_length": [1]}, Says("min_length", "[1]", "a whole number", "write it")),
    "seed as text": ({"seed": "x"}, Says("seed", "'x'", "a whole number", "write it")),
    "seed as a float": ({"seed": 1.5}, Says("seed", "1.5", "a whole number", "without a point")),
    "seed as a bool": ({"seed": True}, Says("seed", "True", "a whole number", "write it as a number")),
    "seed as a dict": ({"seed": {0: 1}}, Says("seed", "{0: 1}", "a whole number", "write it")),
    "seed as a generator": ({"seed": torch.Generator()}, Says("seed", "Gen", "a whole number", "write it")),
    "seeds for other prompts": ({"seed": [1, 2, 3]}, Says("seed", "3 given for 1 prompts", "1 for all", "one number")),
    "a seed of 70 bits": (
        {"seed": 2**70},
        Says("seed", str(2**70), "-9223372036854775808 to 9223372036854775807", "leave it out"),
    ),
    "an end token as text": ({"eos_token_id": "</s>"}, Says("eos_token_id", "'</s>'", "a whole number", "write it")),
    "an end token beyond the vocabulary": (
        {"eos_token_id": 97},
        Says("eos_token_id", "97", "0 to 96", "None for no end"),
    ),
    "an end token as a bool": ({"eos_token_id": True}, Says("eos_token_id", "True", "a whole number", "as a number")),
    "a pad token as text": ({"pad_token_id": "x"}, Says("pad_token_id", "'x'", "a whole number", "write it")),
    "a negative pad token": ({"pad_token_id": -1}, Says("pad_token_id", "-1", "0 to 96", "leave it out")),
    "a pad token beyond the vocabulary": ({"pad_token_id": 97}, Says("pad_token_id", "97", "0 to 96", "leave it out")),
    "several pad tokens": ({"pad_token_id": [0, 1]}, Says("pad_token_id", "[0, 1]", "a whole number", "write it")),
    "no returned sequences": (
        {"num_return_sequences": 0},
        Says("num_return_sequences", "0", "1 or more", "leave it out"),
    ),
    "greedy copies": ({"num_return_sequences": 2}, Says("num_return_sequences", "2", "only 1", "do_sample=True")),
    "returned sequences as text": (
        {"num_return_sequences": "2"},
        Says("num_return_sequences", "'2'", "a whole", "write"),
    ),
    "a streamer for two texts": (
        {"input_ids": TWO, "streamer": "recorder"},
        Says("streamer", "2 texts", "only 1 is allowed", "give one prompt"),
    ),
    "a bias as a list": (
        {"logit_bias": [1, 2]},
        Says("logit_bias", "[1, 2]", "a mapping", "write logit_bias={5: -1.0}"),
    ),
    "a bias by text": (
        {"logit_bias": {"5": 1}},
        Says("logit_bias", "'5'", "a whole number", "without a point or quotes"),
    ),
    "a bias by a float": ({"logit_bias": {5.5: 1}}, Says("logit_bias", "5.5", "a whole number", "without a point")),
    "an infinite bias": (
        {"logit_bias": {5: INF}},
        Says("logit_bias", "inf given for token 5", "below infinity", "forbids"),
    ),
    "a bias of NaN": (
        {"logit_bias": {5: NAN}},
        Says("logit_bias", "nan given for token 5", "below infinity", "forbids"),
    ),
    "a bias as text": ({"logit_bias": {5: "x"}}, Says("logit_bias of token 5", "'x'", "one number", "without quotes")),
    "a bias beyond the vocabulary": (
        {"logit_bias": {97: 1.0}},
        Says("logit_bias", "token 97", "0 to 96", "leave it out"),
    ),
    "a bias of a negative id": ({"logit_bias": {-1: 1.0}}, Says("logit_bias", "-1", "at least 0", "leave it out")),
    "every token forbidden": (
        {"logit_bias": dict.fromkeys(range(97), -INF)},
        Says("logit_bias", "97 tokens", "at least 1 of the target's 97", "forbid fewer tokens"),
    ),
    "a sequence bias of single ids": (
        {"sequence_bias": {5: 1.0}},
        Says("sequence_bias", "{5: 1.0}", "tuples of token ids", "sequence_bias={(5,): -1.0}"),
    ),
    "a sequence bias as a list of ids": (
        {"sequence_bias": [5]},
        Says("sequence_bias", "[5]", "tuples", "write sequence"),
    ),
    "a sequence bias as text": (
        {"sequence_bias": "abc"},
        Says("sequence_bias", "'abc'", "tuples of token ids", "write"),
    ),
    "a sequence bias of two tokens": (
        {"sequence_bias": {(5, 6): 1.0}},
        Says("sequence_bias", "[[5, 6]]", "sequences of 1 token", "leave out longer ones"),
    ),
    "a sequence bias as text values": (
        {"sequence_bias": {(5,): "x"}},
        Says("sequence_bias of token 5", "'x'", "one number", "without quotes"),
    ),
}


class Recorder:
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize("symptom", GENERATE)
def test_generate_names_the_argument(symptom: str, model: SpeculativeModel, tokenizer: Any) -> None:
    given, says = GENERATE[symptom]
    fields: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": 2, **given}
    if fields.get("tokenizer") == "ours":
        fields["tokenizer"] = tokenizer
    if fields.get("streamer") == "recorder":
        fields["streamer"] = Recorder()
    assert_raises(lambda: model.generate(**fields), says)


def test_stream_checks_its_arguments_as_generate_does(model: SpeculativeModel) -> None:
    assert_raises(lambda: model.stream(IDS.float()), Says("input_ids", "float32", "torch.long", "a tokenizer returns"))
    assert_raises(lambda: model.stream(TWO, max_new_tokens=2), Says("input_ids", "2 texts", "only 1", "use generate"))


def test_right_values_of_other_types_are_accepted(model: SpeculativeModel) -> None:
    generate: Any = model.generate
    cases: tuple[dict[str, Any], ...] = (
        {"input_ids": IDS.int()},
        {"input_ids": IDS.to(torch.uint8)},
        {"attention_mask": torch.ones(1, 4, dtype=torch.bool)},
        {"attention_mask": torch.ones(1, 4)},
        {"max_new_tokens": numpy.int64(3)},
        {"temperature": numpy.float32(1)},
        {"top_p": torch.tensor(1.0)},
        {"do_sample": 0},
        {"logit_bias": {numpy.int64(5): 0}},
    )
    for fields in cases:
        written = generate(**{"input_ids": IDS, "max_new_tokens": 3, **fields})
        assert torch.equal(written, generate(IDS, max_new_tokens=3))


@pytest.fixture(scope="module")
def folders(target_folder: Path, head: Eagle3Head, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, its head, and damaged copies of both."""
    base = tmp_path_factory.mktemp("api")
    save_head(head, base / "head")
    for name in ("no tensor", "other shape", "not finite", "cut short", "not JSON", "unknown"):
        shutil.copytree(target_folder, base / name)
    name = "model.layers.3.mlp.up_proj.weight"
    tensors = load_file(target_folder / "model.safetensors")
    damaged = {
        "no tensor": {key: value for key, value in tensors.items() if key != name},
        "other shape": {**tensors, name: tensors[name][:5].clone()},
        "not finite": {**tensors, name: tensors[name] * NAN},
    }
    for folder, changed in damaged.items():
        save_file(changed, base / folder / "model.safetensors", metadata={"format": "pt"})
    (base / "cut short/model.safetensors").write_bytes((target_folder / "model.safetensors").read_bytes()[:5000])
    (base / "not JSON/config.json").write_text("{")
    (base / "unknown/config.json").write_text(json.dumps({"model_type": "abacus"}))
    return {"target": target_folder, **{folder.name: folder for folder in base.iterdir()}}


def decode(**fields: Any) -> DecodeSection:
    return DecodeSection(**fields)


# What was given to SpeculativeModel.from_folders; {"head": ...} and so on are looked up among the folders.
FROM_FOLDERS: dict[str, tuple[dict[str, Any], Says]] = {
    "a target that does not exist": (
        {"target": "nothing/here"},
        Says("target: ", "'nothing/here'", "a folder with config.json", "or a hub name"),
    ),
    "a target's path that does not exist": (
        {"target": "./nothing"},
        Says("target: ", "'./nothing'", "a folder", "give a"),
    ),
    "an empty target": ({"target": ""}, Says("path", "''", "a path of one or more characters", "correct or remove it")),
    "a head as the target": ({"target": "head"}, Says("head", "no embedding", "looked for", "give the whole target")),
    "a target that lacks a tensor": (
        {"target": "no tensor"},
        Says("no tensor", "model.layers.3.mlp.up_proj.weight is missing", "all tensors", "download the model again"),
    ),
    "a target's tensor of another shape": (
        {"target": "other shape"},
        Says("other shape", "is [5, 32] but should be [48, 32]", "all tensors", "download the model again"),
    ),
    "a target that was cut short": (
        {"target": "cut short"},
        Says("cut short", "cannot be read", "", "download the target again"),
    ),
    "a target whose config.json is no JSON": ({"target": "not JSON"}, Says("config.json", "not JSON", "", "again")),
    "a target of an unknown type": ({"target": "unknown"}, Says("config.json", "abacus", "none of", "not supported")),
    "no head": ({"head": None}, Says("head", "None", "with decode.drafter head", "give a head")),
    "a head that does not exist": (
        {"head": "nowhere"},
        Says("nowhere", "no config.json", "holds no head", "headstart train"),
    ),
    "a target as the head": ({"head": "target"}, Says("num_hidden_layers", "7", "a head has 1 layer", "train one")),
    "a file as the head": ({"head": "target/config.json"}, Says("config.json", "holds no head", "", "a saved head")),
    "a head with another drafter": (
        {"decode": decode(drafter="prompt_lookup")},
        Says("head", "prompt_lookup", "with decode.drafter head", "no head with another drafter"),
    ),
    "a misspelt field": (
        {"dtyp": "float32"},
        Says("dtyp", "'float32'", "path, revision, dtype", "correct or remove it"),
    ),
    "an unknown dtype": ({"dtype": "float31"}, Says("dtype", "'float31'", "'bfloat16'", "correct or remove it")),
    "torch's dtype": ({"dtype": torch.float32}, Says("dtype", "torch.float32", "'float32'", "correct or remove it")),
    "a device that torch does not know": (
        {"device": "gpu"},
        Says("device", "'gpu'", "a numbered device such as cuda:1", "did you mean cuda?"),
    ),
    "a device that is not there": (
        {"device": "cuda:99"},
        Says("target.device", "'cuda:99'", "auto, cpu", "choose another"),
    ),
    "a searched tree that the head lacks": (
        {"decode": decode(growth="searched")},
        Says("decode.growth", "searched", "a head with a fitted tree", "headstart calibrate RECIPE"),
    ),
    "a draft model that does not exist": (
        {"head": None, "decode": decode(drafter="draft_model", draft_model="no/where")},
        Says("decode.draft_model", "'no/where'", "a folder with config.json", "or a hub name"),
    ),
    "a head as the draft model": (
        {"head": None, "decode": "head as the draft model"},
        Says("head", "embed_tokens.weight is missing", "all tensors of a whole model", "give a model's folder"),
    ),
    "a draft model without a tokenizer": (
        {"head": None, "decode": "target as the draft model"},
        Says("target", "its tokenizer cannot be loaded", "tokenizer.json", "copy or download them again"),
    ),
}


@pytest.mark.parametrize("symptom", FROM_FOLDERS)
def test_from_folders_names_the_argument(symptom: str, folders: dict[str, Path]) -> None:
    given, says = FROM_FOLDERS[symptom]
    fields: dict[str, Any] = {"target": "target", "head": "head", "device": "cpu", **given}
    for name in ("target", "head"):
        first, slash, rest = str(fields[name]).partition("/")
        if first in folders and isinstance(fields[name], str):
            fields[name] = str(folders[first]) + slash + rest
    if isinstance(fields.get("decode"), str):
        folder = folders[fields["decode"].split()[0]]
        fields["decode"] = decode(drafter="draft_model", draft_model=str(folder))
    assert_raises(lambda: SpeculativeModel.from_folders(**fields), says)


def test_a_target_that_computes_nan_is_refused_with_and_without_a_head(folders: dict[str, Path]) -> None:
    broken = SpeculativeModel.from_folders(folders["not finite"], folders["head"], device="cpu")
    says = Says("the target's logits", "NaN or infinite in float32", "only finite ones", "download its weights again")
    assert_raises(lambda: broken.generate(IDS, max_new_tokens=2), says)
    assert_raises(lambda: SpeculativeModel(broken.target).generate(IDS, max_new_tokens=2), says)


def test_the_parts_of_a_model_are_checked(
    model: SpeculativeModel, target: TargetModel, head: Eagle3Head, make_model: Callable[..., LlamaForCausalLM]
) -> None:
    plain, untapped = make_model(), TargetModel(make_model(), ())
    cases: list[tuple[Callable[[], object], Says]] = [
        (lambda: SpeculativeModel(plain), Says("target", "LlamaForCausalLM", "a TargetModel", "TargetModel(model")),  # type: ignore[arg-type]
        (lambda: SpeculativeModel("x"), Says("target", "str", "a TargetModel", "SpeculativeModel.from_folders")),  # type: ignore[arg-type]
        (lambda: SpeculativeModel(target, max_batch=0), Says("max_batch", "0", "1 or more", "leave it out")),
        (lambda: DecodeLoop(target, max_batch=0), Says("max_batch", "0", "1 or more", "is allowed")),
        (lambda: DecodeLoop(target, prefill_chunk=0), Says("prefill_chunk", "0", "1 or more", "leave it out for 512")),
        (lambda: DecodeLoop(target, memory=0), Says("memory", "0 bytes", "are allowed", "lower it")),
        (lambda: DecodeLoop(target, prefix_memory=-1), Says("prefix_memory", "-1 bytes", "1 or more", "leave it out")),
        (
            lambda: SpeculativeModel(target, rule="typical"),  # type: ignore[arg-type]
            Says("rule", "typical", "one of seeded, rejection", "leave it out"),
        ),
        (
            lambda: SpeculativeModel(untapped, model.drafter).generate(IDS, max_new_tokens=2),
            Says("taps", "[2, 3, 4]", "loaded with taps []", "TargetModel.load(section, head.taps)"),
        ),
        (
            lambda: TargetModel(plain, (2, 99)),
            Says("head.taps", "[2, 99]", "0 to 7 are allowed", "leave head.taps out"),
        ),
    ]
    for call, says in cases:
        assert_raises(call, says)


def test_load_head_takes_two_folders_and_checks_them(folders: dict[str, Path], frozen: FrozenTarget) -> None:
    load: Any = headstart.load_head
    head = load(str(folders["head"]), str(folders["target"]))
    assert type(head).__name__ == "Eagle3Head"
    assert head.embedding.dtype == frozen.embedding.dtype
    for folder, target, says in (
        ("nowhere", folders["target"], Says("nowhere", "no config.json", "holds no head", "headstart train RECIPE")),
        (folders["head"], "nowhere", Says("nowhere", "has neither model.safetensors nor", "", "save_pretrained(")),
    ):
        assert_raises(lambda folder=folder, target=target: load(folder, target), says)


def test_a_head_for_a_target_of_other_sizes_is_refused_with_all_of_them(
    folders: dict[str, Path], frozen: FrozenTarget, tmp_path: Path
) -> None:
    shutil.copytree(folders["head"], tmp_path / "head")
    edit_config(tmp_path / "head", lambda config: config.update(vocab_size=5, target_hidden_size=64))
    says = Says("hidden_size: head 64, target 32", "vocab_size: head 5, target 97", "of these sizes", "train one for")
    assert_raises(lambda: headstart.load_head(tmp_path / "head", folders["target"]), says)
    other = replace(frozen, config=replace(frozen.config, num_layers=9))
    says = Says("target_num_layers", "head 7, target 9", "of these sizes is allowed", "headstart convert")
    assert_raises(lambda: load_head_for(folders["head"], other), says)


LOAD_RECIPE: dict[str, tuple[Any, Any, Says]] = {
    "a recipe that does not exist": (
        "none.yaml",
        (),
        Says("none.yaml", "No such file", "", "give the path of a recipe"),
    ),
    "a folder as the recipe": (".", (), Says(".", "Is a directory", "", "give the path of a recipe")),
    "overrides as one text": ("own", "train.steps=3", Says("overrides", "'train.steps=3'", "a list of texts", "write")),
    "an override without a value": (
        "own",
        ["train.steps"],
        Says("train.steps", "'train.steps'", "section.key=value", "for"),
    ),
}


@pytest.mark.parametrize("symptom", LOAD_RECIPE)
def test_load_recipe_names_the_argument(symptom: str, tmp_path: Path) -> None:
    path, overrides, says = LOAD_RECIPE[symptom]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_values(tmp_path)))
    path = tmp_path / "recipe.yaml" if path == "own" else path
    assert_raises(lambda: headstart.load_recipe(path, overrides), says)


def test_a_name_that_headstart_does_not_export_is_told_with_those_that_it_does() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'SpeculativModel'; it has .*SpeculativeModel"):
        headstart.SpeculativModel  # noqa: B018


def test_a_target_section_is_loaded_in_the_dtype_it_names(target_folder: Path) -> None:
    section = TargetSection(path=str(target_folder), dtype="bfloat16", device="cpu")
    assert TargetModel.load(section, ()).dtype == torch.bfloat16
