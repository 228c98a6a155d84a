"""Laws of other families' processors: prompts are those of transformers, and so are the texts that follow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing_target import MARKS, TEMPLATE, TEXT, picture
from tiny_run import END_OF_TEXT, build_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from headstart.inference.core.request import Request
from headstart.inference.engine.loop import generate_batch
from headstart.inference.images.pictures import Sources, read_pictures
from headstart.inference.images.prompts import ImagePrompts, image_prompts
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

NEW = 12
LANGUAGE = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
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
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**LANGUAGE, **layers, "vocab_size": len(tokenizer)},
        vision_config=TOWER | {"image_size": 16},
        mm_tokens_per_image=4,
        image_token_index=soft,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    sizes = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return config, Gemma3Processor(sizes, tokenizer, image_seq_length=4)


def llava() -> Made:
    """The template reads content only as parts."""
    tokenizer = tokenizer_with(["<image>"], "<image>")
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content is string", "false")
    config = AutoConfig.for_model(
        "llava",
        text_config={**LANGUAGE, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=TOWER | {"model_type": "clip_vision_model", "image_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    sizes = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options: Any = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, LlavaProcessor(sizes, tokenizer, patch_size=4, **options)


def idefics3() -> Made:
    """A picture is cut into tiles, with marks between them."""
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = tokenizer_with(marks, "<image>")
    config = AutoConfig.for_model(
        "idefics3",
        text_config={**LANGUAGE, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config=TOWER | {"image_size": 16},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    sizes = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return config, Idefics3Processor(sizes, tokenizer, image_seq_len=4)


@pytest.mark.parametrize("make", [gemma3, llava, idefics3])
def test_prompts_and_texts_of_other_families_are_those_of_transformers(
    make: Callable[[], Made], tmp_path: Path
) -> None:
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
    processor: Any = prompts.processor
    for pictures in ([picture("red")], [picture("blue", 1), picture("green")]):
        words = {"type": "text", "text": "which"}
        parts = [*({"type": "image", "image": each} for each in pictures), words]
        system = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
        turns: Any = [system, {"role": "user", "content": parts}]
        wanted = processor.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        images = prompts.encode(*read_pictures(turns, Sources()))
        assert images.inputs.keys() == wanted.keys() - {"attention_mask"}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in images.inputs.items())
        count = wanted["input_ids"].shape[1]
        assert count - 20 < images.end < count
        text = model.generate(**wanted, max_new_tokens=NEW, do_sample=False)[0, count:].tolist()
        request = Request(images.prompt(target.config.vocab_size), NEW, images=images)
        assert generate_batch(target, [request])[0].tokens == text
