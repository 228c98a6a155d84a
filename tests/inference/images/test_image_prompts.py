"""Laws of prompts with images: they are what transformers makes of the same messages, and `generate` continues them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matrix import slow
from PIL import Image
from seeing_target import END, MARKS, PLACE, START, TEMPLATE, TEXT, picture, text
from tiny_run import END_OF_TEXT, build_target, build_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from headstart.inference.core.request import Request
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import generate_batch
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.images.pictures import Sources, read_pictures
from headstart.inference.images.processor import load_processor
from headstart.inference.images.prompts import ImagePrompts, image_prompts
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

NEW = 6


@pytest.fixture(scope="module")
def section(seeing_folder: Path) -> TargetSection:
    return TargetSection(path=str(seeing_folder), dtype="float32", device="cpu", chat_template_kwargs={"mood": "!"})


@pytest.fixture(scope="module")
def target(section: TargetSection) -> TargetModel:
    return TargetModel.load(section, ())


@pytest.fixture(scope="module")
def prompts(section: TargetSection, target: TargetModel) -> ImagePrompts:
    found = image_prompts(section, ChatTemplate.of(section), target)
    assert isinstance(found, ImagePrompts)
    return found


@pytest.fixture(scope="module")
def model(seeing_folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(seeing_folder).eval()


def image(colour: str, **place: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(colour, **place)}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": [image("red"), text("which colour is it")]}],
    [{"role": "user", "content": [text("look at"), image("green", row=1), text("and"), image("blue", cells=3)]}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image("yellow", column=1), text("which colour")]},
        {"role": "assistant", "content": "yellow"},
        {"role": "user", "content": [text("and this"), image("red", row=1)]},
    ],
]


@pytest.mark.parametrize("messages", [slow(CONVERSATIONS[0]), *CONVERSATIONS[1:]])
def test_prompts_are_those_of_transformers_and_generate_continues_them(target, prompts, model, messages) -> None:
    encoded, end = assert_prompt_of_transformers(prompts, messages)
    ids = encoded["input_ids"]
    assert ids[0, end - 2] == prompts.placeholders[[*prompts.marks].index(PLACE)]
    wanted = model.generate(**encoded, max_new_tokens=NEW, do_sample=False)
    padded = {name: nn.functional.pad(each, (2, 0)) for name, each in encoded.items() if each.shape == ids.shape}
    for drafter in (None, Lookup(Growth(4, 2, 8), ngram=1)):
        ours: Any = SpeculativeModel(target, drafter)
        assert torch.equal(ours.generate(**{**encoded, **padded}, max_new_tokens=NEW)[:, 2:], wanted)
        blocks = ours.stream(**encoded, max_new_tokens=NEW)
        assert [token for block in blocks for token in block] == wanted[0, ids.shape[1] :].tolist()


def assert_prompt_of_transformers(prompts: ImagePrompts, messages: list[dict[str, Any]]) -> tuple[Any, int]:
    """The prompt that transformers makes of messages, and where its pictures end in ours."""
    own: Any = prompts.processor
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    wanted = own.apply_chat_template(messages, **options)
    found = prompts.encode(*read_pictures(messages, Sources()))
    assert found.inputs.keys() == wanted.keys() - {"attention_mask"}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.inputs.items())
    return wanted, found.end


def test_a_placeholder_that_the_target_wrote_shows_no_image(target: TargetModel, prompts: ImagePrompts) -> None:
    images = prompts.encode(*read_pictures(CONVERSATIONS[0], Sources()))
    ids = images.inputs["input_ids"][0].tolist()
    text = [*ids, 5, ids[images.end - 2], 6]
    whole = images.over_text(text)
    assert whole.inputs["input_ids"][0].tolist() == [*ids, 5, 0, 6]
    assert target.passes.forward(torch.tensor([text]), images=whole).logits.isfinite().all()


def test_generate_refuses_tensors_that_it_cannot_use(target, prompts, tmp_path) -> None:
    given: dict[str, Any] = dict(prompts.encode(*read_pictures(CONVERSATIONS[0], Sources())).inputs)
    ours: Any = SpeculativeModel(target)
    ids = given["input_ids"]
    words: Any = prompts.processor(text=["hello"], return_tensors="pt")
    plain = ours.generate(words["input_ids"], max_new_tokens=3)
    assert torch.equal(ours.generate(**words, max_new_tokens=3), plain)
    with pytest.raises(ValueError, match=r"pixel_values: with 2 prompts given, 1 prompt is allowed; call generate"):
        ours.generate(**{**given, "input_ids": ids.repeat(2, 1)}, attention_mask=torch.ones(2, ids.shape[1]))
    with pytest.raises(ValueError, match=r"pixel_values: list given, a torch tensor is allowed; .*return_tensors"):
        ours.generate(**{**given, "pixel_values": [1]})
    with pytest.raises(ValueError, match=r"input_ids: 4 placeholders of images given, only with their .*processor"):
        ours.generate(**{name: each for name, each in given.items() if name != "pixel_values"})
    others = {
        "no grid": {name: each for name, each in given.items() if name != "image_grid_thw"},
        "no types": {name: each for name, each in given.items() if name != "mm_token_type_ids"},
        "fewer pixels": {**given, "pixel_values": given["pixel_values"][:-4]},
        "another grid": {**given, "image_grid_thw": given["image_grid_thw"] * 2},
        "fewer places": {**given, "input_ids": torch.cat([ids[:, :7], ids[:, 8:]], 1)},
    }
    for knows_images in (False, True):  # the first prompt is a trial of the target
        target.passes.decodes_after_images = knows_images
        for wrong in others.values():
            with pytest.raises(ValueError, match=r"images: .* given, .* allowed; .* generate\(\*\*processor"):
                ours.generate(**wrong)
    blind = TargetModel.load(TargetSection(path=str(build_target(tmp_path)), dtype="float32", device="cpu"), ())
    with pytest.raises(ValueError, match=r"images: with a 'llama' target, which has no image tower given"):
        SpeculativeModel(blind).generate(**{**given, "input_ids": ids.clamp(max=299)}, max_new_tokens=3)


def test_words_are_not_read_as_the_place_of_a_picture_and_pictures_and_places_must_match(prompts: ImagePrompts) -> None:
    turns, pictures = read_pictures(CONVERSATIONS[2], Sources())
    for at, content in ((0, f"x {PLACE}"), (3, [text("a"), {"type": "image"}, text(PLACE)])):
        changed = [{**turn, "content": content} if number == at else turn for number, turn in enumerate(turns)]
        with pytest.raises(ValueError, match=rf"messages\[{at}\].content.*, a text without the target's mark") as told:
            prompts.encode(changed, pictures)
        assert PLACE in str(told.value)
    with pytest.raises(ValueError, match=r"tools\[0\].name: "):
        prompts.encode(turns, pictures, [{"name": PLACE}])
    pair = [picture(), picture("blue")]
    with pytest.raises(ValueError, match=r"messages: 2 pictures, for which the .* writes 1 places, .* the user's mess"):
        prompts.encode_text(f"{START}{PLACE}{END}", pair)
    with pytest.raises(ValueError, match=r"messages: 1 pictures, for which the .* writes 2 places, .* one for each pl"):
        prompts.encode_text(PLACE * 2, pair[:1])
    with pytest.raises(ValueError, match=r"messages: pictures that the target's processor refuses \(.*200.*\) given"):
        prompts.encode_text(PLACE, [Image.new("RGB", (3000, 4))])


def test_the_processors_template_is_used_where_the_tokenizers_leaves_pictures_or_words_out(seeing_folder: Path) -> None:
    processor, template = load_processor(seeing_folder), ChatTemplate(load_processor(seeing_folder).tokenizer)
    template.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    given = read_pictures([{"role": "user", "content": [image("red"), text("x")]}], Sources())
    assert ImagePrompts(template, processor).encode(*given).inputs["pixel_values"].shape == (16, 96)
    assert template.render([{"role": "user", "content": "x"}]) == "x"
    bare = ChatTemplate(load_processor(seeing_folder).tokenizer)
    bare.tokenizer.chat_template = None
    assert ImagePrompts(bare, processor).template is bare
    assert bare.render([{"role": "user", "content": "x"}]) == "[user]x[assistant]"
    processor.chat_template = TEMPLATE.replace(PLACE, "")
    with pytest.raises(ValueError, match=rf"writes no {PLACE.replace('|', '.')} for a picture"):
        ImagePrompts(template, processor)
    # LLaVA's, Idefics's and SmolVLM's templates left out messages whose content is a text.
    template = ChatTemplate(load_processor(seeing_folder).tokenizer)
    template.tokenizer.chat_template = TEMPLATE.replace("m.content is string", "false")
    turns: Any = [{"role": "system", "content": "be brief"}]
    turns += [{"role": "user", "content": [{"type": "image"}, text("x")]}]
    assert template.render(turns) == f"[system]be brief[user]{START}{PLACE}{END}x[assistant]"


def test_why_a_target_reads_no_images(seeing_folder, target, tmp_path, monkeypatch) -> None:
    blind = TargetSection(path=str(build_target(tmp_path / "blind")), dtype="float32", device="cpu")
    assert image_prompts(blind, ChatTemplate.of(blind), TargetModel.load(blind, ())) == "the target has no image tower"
    assert "blind: no processor reads pictures (its Tok" in str(image_prompts(blind, ChatTemplate.of(blind), target))
    with pytest.raises(ValueError, match=r"lost: no processor reads pictures .* are needed: "):
        load_processor(tmp_path / "lost")
    section = TargetSection(path=str(seeing_folder), dtype="float32", device="cpu")
    wrong = TargetModel.load(section, ())
    monkeypatch.setattr("headstart.inference.targets.model.difference_with_images", lambda *_: "whose passes differ")
    assert "whose passes differ" in str(image_prompts(section, ChatTemplate.of(section), wrong))


LANGUAGE = {name: value for name, value in TEXT.items() if name != "rope_parameters"} | {"num_hidden_layers": 3}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4}
Made = tuple[Any, Any]  # configuration and processor


def tokenizer_with(marks: list[str], place: str, **named: str) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "extra_special_tokens": named or marks}
    own: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **ends)
    own.chat_template = TEMPLATE.replace("".join(MARKS), place)
    return own


def gemma3() -> Made:
    """The template writes another token than the placeholders."""
    marks = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    tokenizer = tokenizer_with([*marks.values()], "<boi>", **marks)
    begin, end, soft = tokenizer.convert_tokens_to_ids([*marks.values()])
    layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
    text = {**LANGUAGE, **layers, "vocab_size": len(tokenizer)}
    ids = {"image_token_index": soft, "boi_token_index": begin, "eoi_token_index": end, "mm_tokens_per_image": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=TOWER | {"image_size": 16}, **ids)
    sizes = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return config, transformers.Gemma3Processor(sizes, tokenizer, image_seq_length=4)


def llava() -> Made:
    """The template reads content only as parts."""
    tokenizer = tokenizer_with(["<image>"], "<image>")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content is string", "false")
    text = {**LANGUAGE, "model_type": "llama", "vocab_size": len(tokenizer)}
    tower = TOWER | {"model_type": "clip_vision_model", "image_size": 8}
    ids = {"image_token_index": tokenizer.convert_tokens_to_ids("<image>"), "image_seq_length": 4}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=tower, **ids)
    sizes = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options: Any = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, transformers.LlavaProcessor(sizes, tokenizer, patch_size=4, **options)


def idefics3() -> Made:
    """A picture is cut into tiles, with marks between them."""
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = tokenizer_with(marks, "<image>")
    text = {**LANGUAGE, "model_type": "llama", "vocab_size": len(tokenizer)}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "scale_factor": 2}
    config = AutoConfig.for_model("idefics3", text_config=text, vision_config=TOWER | {"image_size": 16}, **ids)
    sizes = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return config, transformers.Idefics3Processor(sizes, tokenizer, image_seq_len=4)


@pytest.mark.parametrize("make", [gemma3, slow(llava), idefics3])
def test_prompts_and_texts_of_other_families_are_those_of_transformers(make, tmp_path) -> None:
    config, saved = make()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    saved.save_pretrained(tmp_path)
    section = TargetSection(path=str(tmp_path), dtype="float32", device="cpu")
    target = TargetModel.load(section, ())
    prompts = image_prompts(section, ChatTemplate.of(section), target)
    assert isinstance(prompts, ImagePrompts)
    for pictures in ([image("red")], [image("blue", row=1), image("green")]):
        turns: Any = [{"role": "system", "content": [text("be brief")]}]
        turns.append({"role": "user", "content": [*pictures, text("which")]})
        wanted, end = assert_prompt_of_transformers(prompts, turns)
        count = wanted["input_ids"].shape[1]
        assert count - 20 < end < count
        written = model.generate(**wanted, max_new_tokens=NEW, do_sample=False)[0, count:].tolist()
        images = prompts.encode(*read_pictures(turns, Sources()))
        request = Request(images.prompt(target.config.vocab_size), NEW, images=images)
        assert generate_batch(target, [request])[0].tokens == written
