"""Table of bad inputs to the Python API: the ValueError names the argument, its value, what is allowed, what to do."""

import json
import reprlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from bad_inputs import Says, assert_message, assert_raises
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, TextStreamer

from headstart.heads.kinds.checkpoint import save_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.drafters.head import HeadDrafter
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.targets.loading import fast_dtype
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection

pytestmark = pytest.mark.usefixtures("as_in_production")

DEMO = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "assets" / "demo_target")
INF, NAN = float("inf"), float("nan")
IDS = torch.tensor([[5, 6, 7, 11]])
TWO = torch.tensor([[0, 5, 6], [7, 8, 9]])
SAMPLE = {"do_sample": True}


@pytest.fixture(scope="module")
def model(target: TargetModel, head: Eagle3Head) -> SpeculativeModel:
    return SpeculativeModel(target, HeadDrafter(head, Dynamic(2, 2, 4)))


BATCH = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9], [7, 8, 4]]), "pad_token_id": 0}
WHOLE = "a whole number"
# The field, its value, what the message says of the value (None: the value itself), and what is allowed.
VALUES: list[tuple[str, Any, str | None, str]] = [
    ("input_ids", torch.tensor([[5, 97]]), "token id 97", "0 to 96"),
    ("input_ids", IDS.float(), "a tensor of torch.float32", "torch.long"),
    ("input_ids", ["a", "b"], "list ['a', 'b']", "a torch tensor is allowed; write generate(**tokenizer("),
    ("input_ids", IDS[0], "shape [4]", "[batch, seq]"),
    ("input_ids", IDS[:, :0], "shape [1, 0]", "one column"),
    ("inputs_embeds", torch.zeros(1, 4, 32), "tensor", "None is allowed"),
    ("attention_mask", torch.ones(1, 2), "shape [1, 2]", "[1, 4]"),
    ("attention_mask", torch.full((1, 4), 2), "values [2]", "only 0 (padding)"),
    ("generation_config", {"max_new_tokens": 3}, None, "a GenerationConfig"),
    ("max_new_token", 3, None, "None is allowed (did you mean max_new_tokens?)"),
    ("num_beams", 4, None, "1 is allowed"),
    ("logits_processor", [len], None, "None is allowed"),
    ("stop_strings", 3, None, "a text or a list of texts"),
    ("do_sample", "yes", None, "True or False"),
    ("top_k", True, None, WHOLE),
    ("top_p", NAN, None, "above 0"),
    ("min_p", -0.1, None, "0 to 1"),
    ("presence_penalty", 3, None, "-2 to 2"),
    ("max_new_tokens", 0, None, "1 or more"),
    ("max_new_tokens", 3.0, None, WHOLE),
    ("max_new_tokens", 10**9, None, "up to 252 new tokens are allowed"),
    ("min_new_tokens", -1, None, "at least 0"),
    ("seed", [1, 1.5], None, WHOLE),
    ("seed", [1, 2, 3], "3 given for 1 prompts", "1 for all"),
    ("seed", 2**70, None, "-9223372036854775808 to 9223372036854775807"),
    ("eos_token_id", [97], "97", "0 to 96"),
    ("pad_token_id", 97, None, "0 to 96"),
    ("forced_eos_token_id", [3, 4], None, "one token id"),
    ("forced_eos_token_id", 97, None, "0 to 96"),
    ("bad_words_ids", [3], None, "a list of lists of token ids"),
    ("num_return_sequences", 0, None, "1 or more"),
    ("num_return_sequences", 2, None, "only 1 is allowed without do_sample=True"),
    ("sequence_bias", {("5",): 1}, None, "tuples of 1 token id"),
    ("sequence_bias", {(5,): INF}, None, "below infinity"),
    ("sequence_bias", [5], None, "tuples of 1 token id"),
    ("sequence_bias", {(5, 6): 1.0}, None, "tuples of 1 token id"),
]
# Fields of a call, and parts of the message where the value alone is not wrong.
COMBINED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "input_ids: missing | [batch, seq] | generate(**tokenizer("),
    ({"input_ids": torch.full((1, 300), 5)}, "max_new_tokens | 300 tokens | 256 positions | shorten the prompt"),
    ({"attention_mask": torch.zeros(1, 4)}, "input_ids | prompt 1 of 1 consists of padding | at least one token"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "input_ids | prompt 1 of 1 | allowed on the left | side='left'"),
    ({"input_ids": TWO.flip(1), "pad_token_id": 0}, "input_ids | prompt 1 of 2 | on the left only"),
    ({"top_k": "5", "num_beams": 4}, "top_k: '5' | num_beams: 4 | a whole number | leave"),
    ({"stop_strings": "x"}, "stop_strings | without a tokenizer | pass a tokenizer"),
    ({"input_ids": TWO, "stop_strings": "x", "tokenizer": DEMO}, "pad_token_id | missing | give one"),
    ({**SAMPLE, "temperature": NAN}, "temperature | nan | 0 to 100 | leave it out"),
    ({**SAMPLE, "temperature": 0}, "temperature | 0 | more than 0 | do_sample=False"),
    ({"temperature": 0.7}, "temperature | 0.7 | needs do_sample=True | leave temperature out"),
    ({"output_scores": True}, "output_scores | True | return_dict_in_generate | set it"),
    ({"max_new_tokens": None, "max_length": 2}, "max_length | 2 | more than the 4 columns | give max_new_tokens"),
    ({**BATCH, "seed": [1, 2]}, "seed | 2 given for 3 prompts | 1 for all or 3 | one number"),
    ({**BATCH, "streamer": TextStreamer(DEMO)}, "streamer | 3 texts | only 1 is allowed | give one prompt"),
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in VALUES))
def test_generate_names_the_field_its_value_what_is_allowed_and_what_to_do(name: str, model: SpeculativeModel) -> None:
    for _, value, shown, allowed in (row for row in VALUES if row[0] == name):
        fields: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": 2, name: value}
        with pytest.raises(ValueError, match=rf"^{name}: .*\ballowed\b.*[;:] \w") as error:
            model.generate(**fields)
        assert_message(str(error.value), Says("", reprlib.repr(value) if shown is None else shown, allowed, ""))


@pytest.mark.parametrize(("fields", "facts"), COMBINED, ids=[", ".join(fields) for fields, _ in COMBINED])
def test_generate_names_what_does_not_fit_together(fields: dict[str, Any], facts: str, model: SpeculativeModel) -> None:
    assert_raises(lambda: model.generate(**{"input_ids": IDS, "max_new_tokens": 2, **fields}), facts)


def test_stream_checks_its_arguments_as_generate_does(model: SpeculativeModel) -> None:
    assert_raises(lambda: model.stream(IDS.float()), Says("input_ids", "float32", "torch.long", "a tokenizer returns"))
    assert_raises(lambda: model.stream(TWO, max_new_tokens=2), Says("input_ids", "2 texts", "only 1", "use generate"))


def test_right_values_of_other_types_are_accepted(model: SpeculativeModel) -> None:
    generate: Any = model.generate
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"input_ids": IDS.int()}, {}),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.bool)}, {}),
        ({"max_new_tokens": numpy.int64(3)}, {}),
        ({"temperature": numpy.float32(1)}, {}),
        ({"do_sample": 0}, {}),
        ({"sequence_bias": {(numpy.int64(5),): 0}}, {}),
        ({**SAMPLE, "seed": torch.tensor(3)}, {**SAMPLE, "seed": 3}),
        ({"eos_token_id": torch.tensor([5, 6])}, {"eos_token_id": [5, 6]}),
    )
    shared = {"input_ids": IDS, "max_new_tokens": 3}
    for fields, plain in cases:
        assert torch.equal(generate(**{**shared, **fields}), generate(**{**shared, **plain}))


@pytest.fixture(scope="module")
def folders(target_folder: Path, head: Eagle3Head, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("api")
    save_head(head, base / "head")
    for name in ("no tensor", "other shape", "not finite", "cut short", "unknown"):
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
    (base / "unknown/config.json").write_text(json.dumps({"model_type": "abacus"}))
    return {"target": target_folder, **{folder.name: folder for folder in base.iterdir()}}


# What was given to SpeculativeModel.from_folders; {"head": ...} and so on are looked up among the folders.
FROM_FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "a target that does not exist": ({"target": "nothing/here"}, "target:  | 'nothing/here' | or a hub name"),
    "a head as the target": ({"target": "head"}, "head | no embedding | looked for | give the whole target"),
    "a target without a tensor": ({"target": "no tensor"}, "no tensor | model.layers.3.mlp.up_proj.weight is missing"),
    "a tensor of another shape": ({"target": "other shape"}, "other shape | is [5, 32] but should be [48, 32]"),
    "a target that was cut short": ({"target": "cut short"}, "cut short | cannot be read | download the target again"),
    "a target of an unknown type": ({"target": "unknown"}, "config.json | abacus | none of | not supported"),
    "no head": ({"head": None, "decode": DecodeSection()}, "head | None | with decode.drafter head | give a head"),
    "a head with another drafter": (
        {"decode": DecodeSection(drafter="prompt_lookup")},
        "head | prompt_lookup | with decode.drafter head | no head with another drafter",
    ),
    "a misspelt field": ({"dtyp": "float32"}, "dtyp | 'float32' | path, adapter, revision | correct or remove it"),
    "a number format that is not known": ({"dtype": "half"}, "dtype | 'half' given | allowed: 'float32' | correct"),
    "a device that torch does not know": ({"device": "gpu"}, "device | 'gpu' | auto, cpu, cuda | choose one"),
    "a searched tree that the head lacks": (
        {"decode": DecodeSection(growth="searched")},
        "decode.growth | searched | a head with a fitted tree | headstart calibrate RECIPE",
    ),
    "a draft model without a tokenizer": (
        {"head": None, "decode": "target as the draft model"},
        "target | its tokenizer cannot be loaded | tokenizer.json | copy or download them again",
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
        fields["decode"] = DecodeSection(drafter="draft_model", draft_model=str(folder))
    assert_raises(lambda: SpeculativeModel.from_folders(**fields), says)


def test_from_folders_refused_dtype_auto_and_loaded_large_targets_in_silence(folders, monkeypatch, capsys) -> None:
    fast, loud = getattr(torch, fast_dtype(torch.device("cpu"))), f"loading {folders['target']}: 0.0 GB\n"
    for dtype, expected, most, says in (("auto", fast, 10**9, ""), (torch.float32, torch.float32, 1000, loud)):
        monkeypatch.setattr("headstart.inference.targets.model.QUIET_BYTES_MAX", most)
        model = SpeculativeModel.from_folders(folders["target"], folders["head"], device="cpu", dtype=dtype)
        assert model.target.dtype == expected
        assert says in (said := capsys.readouterr().err)
        assert ("loading" in said) == bool(says)


def test_a_target_that_computes_nan_is_refused_with_and_without_a_head(folders: dict[str, Path]) -> None:
    broken = SpeculativeModel.from_folders(folders["not finite"], folders["head"], device="cpu")
    says = Says("the target's logits", "NaN or infinite in float32", "only finite ones", "download its weights again")
    assert_raises(lambda: broken.generate(IDS, max_new_tokens=2), says)
    assert_raises(lambda: SpeculativeModel(broken.target).generate(IDS, max_new_tokens=2), says)


def test_the_parts_of_a_model_are_checked(model, target, head, make_model) -> None:
    plain, untapped = make_model(), TargetModel(make_model(), ())
    cases: list[tuple[Callable[[], object], Says]] = [
        (lambda: SpeculativeModel(plain), Says("target", "LlamaForCausalLM", "a TargetModel", "TargetModel(model")),
        (lambda: SpeculativeModel("x"), Says("target", "str", "a TargetModel", "SpeculativeModel.from_folders")),  # type: ignore[arg-type]
        (lambda: SpeculativeModel(target, max_batch=0), Says("max_batch", "0", "1 or more", "leave it out")),
        (lambda: DecodeLoop(target, max_batch=0), Says("max_batch", "0", "1 or more", "is allowed")),
        (lambda: DecodeLoop(target, prefill_chunk=0), Says("prefill_chunk", "0", "1 or more", "leave it out for 512")),
        (lambda: DecodeLoop(target, memory=0), Says("memory", "0 bytes", "are allowed", "lower it")),
        (lambda: DecodeLoop(target, prefix_memory=-1), Says("prefix_memory", "-1 bytes", "1 or more", "leave it out")),
        (
            lambda: SpeculativeModel(untapped, model.drafter).generate(IDS, max_new_tokens=2),
            Says("taps", "[0, 1, 2]", "loaded with taps []", "TargetModel.load(section, head.taps)"),
        ),
        (lambda: TargetModel(plain, (2, 99)), Says("head.taps", "[2, 99]", "0 to 2 are allowed", "leave head.taps")),
    ]
    for call, says in cases:
        assert_raises(call, says)
