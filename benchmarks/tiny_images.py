"""Prompts with images for the tiny models of `tiny_targets.py`.

The pixels are random, in the form in which the processor of each type gives them. A type's maker makes one image of a
random size; the images of a prompt are joined, and its tokens have one placeholder for each feature of an image.
"""

from collections.abc import Callable
from typing import Any

import torch
from tiny_targets import FIRST_WORD, WORDS
from torch import Generator, Tensor
from transformers import PreTrainedModel

from headstart.inference.core.request import Images

Inputs = dict[str, Tensor]
Maker = Callable[[Any, Generator], Inputs]


def square(model: Any, random: Generator, **more: Tensor) -> Inputs:
    """One image of the tower's size."""
    size = vars(tower(model)).get("image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(1, 3, height, width, generator=random), **more}


def sized(model: Any, random: Generator) -> Inputs:
    """One image whose size is given beside its pixels."""
    height, width = pick([(16, 16), (16, 16)], random)
    return {
        "pixel_values": torch.randn(1, 3, height, width, generator=random),
        "image_sizes": torch.tensor([[height, width]]),
    }


def patches(model: Any, random: Generator, name: str = "image_grid_thw", **more: Tensor) -> Inputs:
    """The patches of one image in rows, with its grid."""
    height, width = pick([(4, 8), (8, 4), (4, 4)], random)
    grid = [1, height, width] if name == "image_grid_thw" else [height, width]
    shape = next(p.shape[1:] for n, p in model.named_parameters() if ("patch_emb" in n or "embeddings.proj" in n or "patch_generator.embedder" in n) and "weight" in n and p.ndim > 1)
    pixels = torch.randn(height * width, shape.numel(), generator=random)
    return {"pixel_values": pixels, name: torch.tensor([grid]), **more}


def tiles(model: Any, random: Generator) -> Inputs:
    """An image as a thumbnail and tiles of the tower's size."""
    side, (rows, columns) = tower(model).image_size, pick([(1, 2), (2, 1)], random)
    return {
        "pixel_values": torch.randn(1, 1 + rows * columns, 3, side, side, generator=random),
        "image_sizes": torch.tensor([[rows * side, columns * side]]),
    }


def in_one_row(model: Any, random: Generator) -> Inputs:
    """One image of a prompt whose images lie in one row of a batch."""
    inputs = {"pixel_values": square(model, random)["pixel_values"][None]}
    return inputs | ({"pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)} if model.config.model_type == "granite_docling" else {})


def at_places(model: Any, random: Generator) -> Inputs:
    """The patches of one image, each with its column and row."""
    height, width = pick([(4, 4), (2, 8), (8, 2)], random)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    size = tower(model).patch_size if model.config.model_type == "gemma4" else tower(model).model_patch_size
    return {"pixel_values": torch.rand(1, 16, 3 * size**2, generator=random), "image_position_ids": places[None]}


def grouped(model: Any, random: Generator) -> Inputs:
    """The patches of one image as small images, with their grid."""
    inputs, size = patches(model, random), tower(model).patch_size
    return inputs | {"pixel_values": inputs["pixel_values"].unflatten(-1, (-1, size, size))}


def merged(model: Any, random: Generator) -> Inputs:
    """One image as small images of one feature each, with their grid."""
    height, width = pick([(2, 4), (4, 2), (2, 2)], random)
    side = tower(model).patch_size * tower(model).spatial_merge_size
    pixels = torch.randn(height * width, side, side, 3, generator=random)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def tower(model: Any) -> Any:
    """The configuration of a model's image tower."""
    return next(vars(model.config)[name] for name in ("vision_config", "vq_config") if name in vars(model.config))


def pick(values: list[Any], random: Generator) -> Any:
    return values[int(torch.randint(len(values), (), generator=random))]


MAKERS: dict[str, Maker] = {
    **dict.fromkeys(
        "aria aya_vision chameleon cohere2_vision deepseek_vl gemma3 got_ocr2 internvl janus llava llama4 ovis2 paligemma "
        "pp_chart2table qianfan_ocr shieldgemma2 video_llava vipllava".split(),
        square,
    ),
    **dict.fromkeys("emu3 lighton_ocr mistral3 mistral_large4".split(), sized),
    **dict.fromkeys("granite4_vision llava_next llava_next_video llava_onevision".split(), tiles),
    **dict.fromkeys("granite_docling idefics2 idefics3 smolvlm".split(), in_one_row),
    **dict.fromkeys("gemma4 gemma4_unified".split(), at_places),
    "kimi_k25": grouped,
    "paddleocr_vl": grouped,
    "inkling2": merged,
    "video_llama_3": lambda *given: patches(*given, image_merge_sizes=torch.tensor([2])),
    "step3p7": square,
    **dict.fromkeys("minimax_m3_vl muse_glimmer muse_spark".split(), patches),
    "lfm2_vl": lambda *given: (inputs := patches(*given, "spatial_shapes")) | {"pixel_values": inputs["pixel_values"][None], "pixel_attention_mask": torch.ones(1, len(inputs["pixel_values"]), dtype=torch.long)},
    "nemotron_h_omni": lambda *given: patches(*given, "image_grid_hw"),
    "fuyu": lambda m, r: {"pixel_values": torch.randn(1, 6, 3 * m.config.patch_size**2, generator=r)},
    **dict.fromkeys(
        "cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe glm5_next "
        "glm_ocr glmga hunyuan_vl hyperclovax_vision_v2 lfm3_vl qwen2_5_omni_thinker qwen2_5_vl "
        "qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp".split(),
        patches,
    ),
}


def prompt_with_images(name: str, model: PreTrainedModel, count: int, seed: int) -> tuple[list[int], Images | None]:
    """A prompt of words with `count` images among them."""
    random = Generator().manual_seed(seed)
    images = [MAKERS[name](model, random) for _ in range(count)]
    tokens = words(5, random)
    for image in images:
        tokens += [placeholder(model)] * num_features(model, image)
        end = len(tokens)
        tokens += words(3, random)
    if not images:
        return tokens, None
    inputs = {key: torch.cat([image[key] for image in images]) for key in images[0]}
    return tokens, Images({**inputs, **token_types(model, tokens)}, end)


def words(count: int, random: Generator) -> list[int]:
    drawn: list[int] = torch.randint(FIRST_WORD, WORDS, (count,), generator=random).tolist()
    return drawn


def placeholder(model: Any) -> int:
    fields = model.config.to_dict() | {k: getattr(model.config, k) for k in ("image_token_id",) if hasattr(model.config, k)}
    return next(fields[name] for name in ("image_token_id", "image_token_index") if fields.get(name) is not None)


def num_features(model: Any, image: Inputs) -> int:
    """Features of an image, and so placeholders in the prompt."""
    encoder = model if hasattr(model, "get_image_features") else model.model
    with torch.inference_mode():
        output = encoder.get_image_features(**image)
    if model.config.model_type == "granite4_vision":
        output.pooler_output = output.deepstack_features[0][1]
    features = output if getattr(output, "pooler_output", None) is None else output.pooler_output
    features = getattr(features, "last_hidden_state", features)
    return sum(each.shape[:-1].numel() for each in (features if isinstance(features, list | tuple) else [features]))


def token_types(model: Any, tokens: list[int]) -> Inputs:
    """Which tokens are images, under the name by which a model takes it."""
    import inspect
    arguments = inspect.signature(model.forward).parameters
    types = (torch.tensor([tokens]) == placeholder(model)).long()
    return {name: types for name in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids") if name in arguments}
