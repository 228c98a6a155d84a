"""A tiny random target that reads images, with its tokenizer, chat template and processor; and pictures to show it.

A picture is a grid of 2 by 2 cells, one of them coloured. The target has one placeholder token for each cell.
"""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from families import GROUPED
from PIL import Image
from tiny_run import ENDS, build_chat_run, build_letters, build_run, build_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

START, PLACE, END = MARKS = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + "".join(MARKS) + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
TEXT: dict[str, Any] = {
    **{**GROUPED, "num_hidden_layers": 6, "initializer_range": 0.3, "eos_token_id": ENDS},
    **{"tie_word_embeddings": False, "rope_parameters": ROPE},
}
TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
CELL = 8  # pixels along a side: 2 patches
COLOURS = {"red": (220, 30, 30), "green": (20, 200, 60), "blue": (30, 60, 220), "yellow": (230, 220, 40)}


def build_seeing_target(folder: Path, seed: int = 0, tokenizer: Any = None, **text_changes: Any) -> Path:
    """Save a random Qwen3-VL, its tokenizer (byte-level, with the three marks of images) and its processor."""
    tokenizer = tokenizer or build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<|video_pad|>"]})
    tokenizer.chat_template, tokenizer.model_max_length = TEMPLATE, 256
    names = "vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids([*MARKS, "<|video_pad|>"]), strict=True))
    text = {**TEXT, "vocab_size": len(tokenizer), **text_changes}
    tower = {**TOWER, "deepstack_visual_indexes": [0, 1, 2]}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2}  # pixels of a picture, not of an edge
    Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=sizes).save_pretrained(folder)
    return folder


def picture(colour: str = "red", row: int = 0, column: int = 0, cells: int = 2) -> Image.Image:
    """A white picture with one coloured cell."""
    image = Image.new("RGB", (cells * CELL, cells * CELL), (255, 255, 255))
    image.paste(COLOURS[colour], (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL))
    return image


def text(words: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "text", "text": words}


def file_bytes(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(image: Image.Image | bytes, form: str = "PNG") -> str:
    content = image if isinstance(image, bytes) else file_bytes(image, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(content).decode()}"


def build_seeing_run(folder: Path) -> Path:
    """`build_run` for a target that reads images; two of three prompts show one or two pictures."""
    build_run(folder)
    build_seeing_target(folder / "target")
    (folder / "shown").mkdir()
    for name, count, first in (("prompts", 14, 0), ("heldout", 5, 100)):
        rows: list[dict[str, Any]] = []
        for number in range(first, first + count):
            shown = [f"shown/{number}_{each}.png" for each in range(number % 3)]
            for each, path in enumerate(shown):
                picture(list(COLOURS)[number % 4], number % 2, each).save(folder / path)
            rows.append({"prompt": f"{number} which colour", "images": shown})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = (folder / "recipe.yaml").read_text().replace("response_tokens: 12", "response_tokens: 5")
    (folder / "recipe.yaml").write_text(recipe.replace("prompt_tokens: 24", "prompt_tokens: 60"))
    return folder / "recipe.yaml"


def build_seeing_chat_run(folder: Path, **data: Any) -> Path:
    """`build_chat_run` for a target that reads images, which writes half of its prompts about three pictures."""
    own: dict[str, Any] = {"self_pictures": str(folder / "shown"), "generate_batch": 16, "response_tokens": 4}
    path = build_chat_run(folder, **own | data)
    build_seeing_target(folder / "target", tokenizer=build_letters(), eos_token_id=0)
    model = AutoModelForImageTextToText.from_pretrained(folder / "target")
    model.lm_head.weight.data[-4:] = 0  # it seldom writes the marks of images
    model.save_pretrained(folder / "target")
    (folder / "shown").mkdir()
    for number, colour in enumerate(list(COLOURS)[:3]):
        picture(colour, number % 2).save(folder / f"shown/{colour}.png")
    return path
