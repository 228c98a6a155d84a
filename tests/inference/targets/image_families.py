"""Decoding after images in every type that reads them and decodes without an encoder, with the tiny models of
`benchmarks/tiny_targets.py`.

    PYTHONPATH=benchmarks python tests/inference/targets/image_families.py    # renew a column of docs/targets.md

The pixels are random, in the form in which the processor of each type gives them. A maker makes one image; the images
of a prompt are joined, and its tokens have one placeholder for each feature of an image.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from target_families import PartlyRight, in_short
from target_page import after_images, write_files
from tiny_targets import FIRST_WORD, SPECIAL, VOCAB, WORDS, make_target
from torch import Generator, Tensor
from transformers import PreTrainedModel

from headstart.inference.core.request import Images, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import generate_batch
from headstart.inference.targets.model import TargetModel
from headstart.targets import SAME, FamilyTable

Inputs = dict[str, Tensor]
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
# After images, whose placeholders are never written.
NO_WORDS = [*range(FIRST_WORD), *range(WORDS, VOCAB)]
WORDS_ALONE = Sampling(seed=3, logit_bias=tuple((token, -100.0) for token in NO_WORDS))
NEW_AFTER_IMAGES = 10
COUNTS = ((1, 2, 0), (1, 2))  # images in the prompts; each has some if the type takes no text alone
GRIDS = [(4, 8), (8, 4), (4, 4)]  # patches in height and width

GEMMA4_TOWER = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 2,
}  # fmt: skip
UNIFIED = {
    "model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 64,
    "mm_posemb_size": 16, "output_proj_dims": 64,
}  # fmt: skip
TWO_WAYS = {"use_bidirectional_attention": "vision"}
SEEN = {"image_token_id": 127}
TILES = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
TO_SMALL_CHANNELS = {"downsample_channels": [64, 64], "global_attn_indexes": [1]}
VISUAL_TOKENS = {f"<|visual token {code:06}|>": 100 + code for code in range(8)}
PROJECTED = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
# What the names of fields do not say about towers, by type.
SPECIAL_TOWERS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "blip-2 instructblip": {"image_token_index": 127},
    "chameleon": {"vocabulary_map": {"<image>": 127, **{f"IMGIMG{'ABCDEFGH'[n]}Z": 100 + n for n in range(8)}}},
    "chameleon_vqgan": {"num_embeddings": 8, "resolution": 32, "num_res_blocks": 1},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    "deepseek_ocr2_sam_vision_model unlimited_ocr_sam_vision_model": TO_SMALL_CHANNELS,
    "emu3": SEEN | {"vocabulary_map": {"<image>": 127, "<|extra_200|>": 126, **VISUAL_TOKENS}},
    "emu3_vqgan": {"codebook_size": 8, "num_res_blocks": 1, "hidden_size": 128},
    "gemma3 shieldgemma2": {"mm_tokens_per_image": 4},
    "gemma4": {"text_config": TWO_WAYS, "vision_config": {"model_type": "gemma4_vision", **GEMMA4_TOWER}},
    "gemma4_unified": {"text_config": TWO_WAYS, "vision_config": UNIFIED},
    "granite4_vision": TILES
    | {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]], "spatial_target_layers": [2]},
    "internvl_vision qianfan_ocr_vision": {"image_size": [16, 16], "patch_size": [4, 4]},
    "llama4_vision_model": {"intermediate_size": 256, **dict.fromkeys(PROJECTED, 64)},
    "llava_next llava_next_video llava_onevision": TILES,
    "minicpm_ocr minicpmv4_6": SEEN | {"insert_layer_id": 0},
    "minicpmv4_7": SEEN | {"insert_layer_id": 0, "image_start_id": 126, "image_end_id": 125},
    "muse_glimmer muse_spark_vision muse_spark": {"out_hidden_size": 256},
    "nemotron_h_omni": SEEN,
    "sam_vision_model": {"global_attn_indexes": [0]},
    "vipllava": {"vision_feature_layer": [-2, -1, 1]},
}
SPECIAL.update({name: fields for names, fields in SPECIAL_TOWERS.items() for name in names.split()})


def square(model: Any, random: Generator) -> Inputs:
    """One image of the tower's size."""
    size = vars(tower(model)).get("image_size", 32)
    return {"pixel_values": pixels(1, 3, *(size if isinstance(size, list | tuple) else (size, size)), random=random)}


def sized(model: Any, random: Generator) -> Inputs:
    """One padded image with its size."""
    size = pick([(16, 16), (8, 16), (16, 8)], random)
    return {"pixel_values": pixels(1, 3, 16, 16, random=random), "image_sizes": torch.tensor([size])}


def thumbnail_and_tiles(model: Any, random: Generator) -> Inputs:
    """One image as a thumbnail and two tiles of the tower's size."""
    side, (rows, columns) = tower(model).image_size, pick([(1, 2), (2, 1)], random)
    size = torch.tensor([[rows * side, columns * side]])
    return {"pixel_values": pixels(1, 3, 3, side, side, random=random), "image_sizes": size}


def patches(model: Any, random: Generator) -> Inputs:
    """The patches of one image in rows, with its grid."""
    height, width = pick(GRIDS, random)
    names = ("patch_emb", "embeddings.proj", "patch_projection")
    weights = (weight for name, weight in model.named_parameters() if weight.ndim > 1 and any(n in name for n in names))
    rows = pixels(height * width, next(weights)[0].numel(), random=random)
    return {"pixel_values": rows, "image_grid_thw": torch.tensor([[1, height, width]])}


def merged(model: Any, random: Generator) -> Inputs:
    """One image as small images of one feature each, with their grid."""
    height, width = pick([(2, 4), (4, 2), (2, 2)], random)
    side = tower(model).patch_size * tower(model).spatial_merge_size
    tiles = pixels(height * width, side, side, 3, random=random)
    return {"pixel_values": tiles, "image_grid_thw": torch.tensor([[1, height, width]])}


def padded_patches(model: Any, random: Generator) -> Inputs:
    """The patches of one image, filled up to the largest number."""
    inputs, most = patches(model, random), 32
    rows, count = inputs["pixel_values"], len(inputs["pixel_values"])
    return {
        "pixel_values": torch.cat([rows, torch.zeros(most - count, rows.shape[1])])[None],
        "spatial_shapes": inputs["image_grid_thw"][:, 1:],
        "pixel_attention_mask": (torch.arange(most) < count).long()[None],
    }


def side_by_side(model: Any, random: Generator) -> Inputs:
    """The patches of one image side by side in one row, with its grid."""
    (height, width), size = pick(GRIDS, random), tower(model).patch_size
    row = pixels(1, 3, size, size * height * width, random=random)
    return {"pixel_values": row, "target_sizes": torch.tensor([[height, width]])}


def at_places(model: Any, random: Generator) -> Inputs:
    """The patches of one image, each with its column and row."""
    height, width = pick([(4, 4), (2, 8), (8, 2)], random)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    size = tower(model).patch_size if model.config.model_type == "gemma4" else tower(model).model_patch_size
    return {"pixel_values": torch.rand(1, 16, 3 * size**2, generator=random), "image_position_ids": places[None]}


def pooled(model: Any, random: Generator) -> Inputs:
    """One crop of 4 x 4 patches, with those that become one feature."""
    block = torch.tensor([[0, 1, 4, 5]])
    return {
        "pixel_values": pixels(1, 16, 3 * tower(model).patch_size ** 2, random=random),
        "image_token_pooling": block + torch.tensor([[0], [2], [8], [10]]),
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
        "image_num_crops": torch.tensor([1]),
    }


def cross_attended(model: Any, random: Generator) -> Inputs:
    """One image of two tiles of four, for layers that attend to it."""
    side = tower(model).image_size
    return {
        "pixel_values": pixels(1, 1, 4, 3, side, side, random=random),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]]),
    }


Maker = Callable[[Any, Generator], Inputs]
BY_FORM: dict[Maker, str] = {
    square: "aria aya_vision blip-2 chameleon cohere2_vision deepseek_ocr2 deepseek_vl gemma3 git got_ocr2 internvl "
    "janus kosmos-2 llama4 llava ovis2 paligemma pp_chart2table qianfan_ocr shieldgemma2 step3p7 unlimited_ocr "
    "video_llava vipllava",
    sized: "emu3 lighton_ocr mistral3 mistral_large4",
    thumbnail_and_tiles: "granite4_vision llava_next llava_next_video llava_onevision",
    patches: "cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe "
    "glm5_next glm_ocr glmga hunyuan_vl hyperclovax_vision_v2 lfm3_vl minimax_m3_vl muse_glimmer muse_spark "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
    "qwen4_exp",
    merged: "inkling2",
    padded_patches: "lfm2_vl",
    side_by_side: "minicpm_ocr minicpmv4_6 minicpmv4_7",
    at_places: "gemma4 gemma4_unified",
    pooled: "molmo2",
    cross_attended: "mllama",
    # One image of the tower's size, one of several of a row in a batch; the same as one tile; in two resolutions.
    lambda model, random: {"pixel_values": square(model, random)["pixel_values"][None]}: "idefics idefics2 idefics3 "
    "smolvlm",
    lambda model, random: {
        "pixel_values": square(model, random)["pixel_values"][None],
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
    }: "granite_docling",
    lambda model, random: {
        **square(model, random),
        "high_res_pixel_values": pixels(1, 3, *[model.config.high_res_vision_config.image_size] * 2, random=random),
    }: "deepseek_vl_hybrid",
    # With the question that its features depend on.
    lambda model, random: {**square(model, random), "qformer_input_ids": torch.tensor([words(4, random)])}: (
        "instructblip"
    ),
    # The patches of one image with its grid, as small images; with how many in a row become one feature; with its
    # height and width alone; for a model without a tower; in two equal frames.
    lambda model, random: {
        name: each.unflatten(-1, (-1, *[tower(model).patch_size] * 2)) if name == "pixel_values" else each
        for name, each in patches(model, random).items()
    }: "kimi_k25 paddleocr_vl",
    lambda model, random: {**patches(model, random), "image_merge_sizes": torch.tensor([2])}: "video_llama_3",
    lambda model, random: {
        name.replace("thw", "hw"): each if name == "pixel_values" else each[:, 1:]
        for name, each in patches(model, random).items()
    }: "nemotron_h_omni",
    lambda model, random: {"pixel_values": pixels(1, 6, 3 * model.config.patch_size**2, random=random)}: "fuyu",
    lambda model, random: {
        "pixel_values": pixels(4, 1, *[tower(model).patch_size] * 2, 3, random=random).repeat(1, 2, 1, 1, 1)
    }: "inkling_mm_model",
}
MAKERS = {name: maker for maker, names in BY_FORM.items() for name in names.split()}
# The axis of a prompt's images; 0 for others.
JOINED_AT = dict.fromkeys(("granite_docling", "idefics", "idefics2", "idefics3", "smolvlm"), 1)
JOINED_AT |= dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), -1)
# A prompt of these has one image, or its images are not joined so simply.
ONE_IMAGE = ("deepseek_ocr2", "git", "idefics", "instructblip", "kosmos-2", "mllama", "molmo2")
# The tokens around an image, by the names of their fields.
BEFORE = ("vision_start_token_id", "boi_token_id", "boi_token_index", "image_start_token_id", "image_start_id")
AFTER = ("vision_end_token_id", "eoi_token_id", "eoi_token_index", "image_end_token_id", "image_end_id")
NUM_PLACEHOLDERS = {"git": 0, "idefics": 0, "kosmos-2": 64, "mllama": 1}  # of types that name no features
NEEDS_IMAGES = ("blip-2", "idefics", "instructblip", "kosmos-2")


def prompt_with_images(name: str, model: PreTrainedModel, count: int, seed: int) -> tuple[list[int], Images | None]:
    """A prompt of words with `count` images among them."""
    random = Generator().manual_seed(seed)
    count = min(count, 1) if name in ONE_IMAGE else count
    images = [MAKERS[name](model, random) for _ in range(count)]
    tokens, end = words(5, random), 0
    before, after = mark(model, BEFORE), mark(model, AFTER)
    for image in images:
        tokens += [*before, *[placeholder(model)] * num_features(model, image), *after]
        end = len(tokens)
        tokens += words(3, random)
    if not images:
        return tokens, None
    axis = JOINED_AT.get(name, 0)
    inputs = {key: torch.cat([image[key] for image in images], axis * key.startswith("pixel")) for key in images[0]}
    return tokens, Images({**inputs, **by_token(model, tokens)}, end)


def with_other_pixels(images: Images) -> Images:
    random = Generator().manual_seed(0)
    seen = {name: each for name, each in images.inputs.items() if each.is_floating_point()}
    other = {name: each / 2 + pixels(*each.shape, random=random) for name, each in seen.items()}
    return Images({**images.inputs, **other}, images.end)


def mark(model: Any, names: tuple[str, ...]) -> list[int]:
    """The token of the first of these fields that a model's configuration has; any other if it has none."""
    return [token for name in names if (token := vars(model.config).get(name)) is not None][:1] or [WORDS]


def pixels(*shape: int, random: Generator) -> Tensor:
    return torch.randn(*shape, generator=random)


def words(count: int, random: Generator) -> list[int]:
    drawn: list[int] = torch.randint(FIRST_WORD, WORDS, (count,), generator=random).tolist()
    return drawn


def pick(values: list[Any], random: Generator) -> Any:
    return values[int(torch.randint(len(values), (), generator=random))]


def tower(model: Any) -> Any:
    """The configuration of a model's image tower."""
    return next(vars(model.config)[name] for name in ("vision_config", "vq_config") if name in vars(model.config))


def placeholder(model: Any) -> int:
    names = ("image_token_id", "image_token_index")
    given = (getattr(model.config, name, None) for name in names)
    return next((token for token in given if token is not None), VOCAB - 1)


def num_features(model: Any, image: Inputs) -> int:
    """Features of an image, and so placeholders in the prompt."""
    if model.config.model_type in NUM_PLACEHOLDERS:
        return NUM_PLACEHOLDERS[model.config.model_type]
    encoder = model if hasattr(model, "get_image_features") else model.model
    with torch.inference_mode():
        output = encoder.get_image_features(**image)
    if model.config.model_type == "granite4_vision":
        output.pooler_output = output.deepstack_features[0][1]
    features = output if getattr(output, "pooler_output", None) is None else output.pooler_output
    features = getattr(features, "last_hidden_state", features)
    return sum(each.shape[:-1].numel() for each in (features if isinstance(features, list | tuple) else [features]))


def by_token(model: Any, tokens: list[int]) -> Inputs:
    """Which tokens are images, or see them, under the names by which a model takes it."""
    types = (torch.tensor([tokens]) == placeholder(model)).long()
    kinds = dict.fromkeys(TOKEN_TYPES, types)
    kinds["image_attention_mask"] = torch.ones_like(types)[..., None]
    kinds["cross_attention_mask"] = torch.tensor([1, 1, 0, 0]).expand(*types.shape, 1, 4)
    return {name: each for name, each in kinds.items() if name in inspect.signature(model.forward).parameters}


def with_images(name: str) -> str:
    """SAME, if each text after images is that of the model's own `generate`; else why not."""
    try:
        model = make_target(name, sees=True)
        prompts = [prompt_with_images(name, model, count, seed=count) for count in COUNTS[name in NEEDS_IMAGES]]
        texts = [own_text_after_images(model, tokens, images) for tokens, images in prompts]
        changed = [(tokens, images and with_other_pixels(images)) for tokens, images in prompts]
        others = [own_text_after_images(model, *each) for each in changed]
    except Exception as error:
        return f"not tried: {in_short(error)}"
    if others == texts:
        return "not tried: its text does not depend on the pixels"
    try:
        target = TargetModel(model, ())
        requests = [Request(tokens, NEW_AFTER_IMAGES, WORDS_ALONE, images=images) for tokens, images in prompts]
        sampled = [replace(request, sampling=replace(WORDS_ALONE, temperature=1.0)) for request in requests]
        different = [*unlike(target, requests, texts), *unlike(target, sampled, None)]
    except ValueError as error:
        return f"refused: {' '.join(str(error).split())}"
    except Exception as error:
        return f"crash: {in_short(error)}"
    return f"differs: {', '.join(different)}" if different else SAME


def own_text_after_images(model: PreTrainedModel, prompt: list[int], images: Images | None) -> list[int]:
    """What transformers' own greedy `generate` writes in words after a prompt with images."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **(images.inputs if images else {})}
        options = {"do_sample": False, "max_new_tokens": NEW_AFTER_IMAGES, "suppress_tokens": NO_WORDS}
        written: Any = cast(Any, model).generate(**inputs, **options)
    text: list[int] = written[0, -NEW_AFTER_IMAGES:].tolist()
    return text


def unlike(target: TargetModel, requests: list[Request], texts: list[list[int]] | None) -> Iterator[str]:
    """The ways of decoding in which a text differs, from the plain ones if no `texts` are given."""
    plain = [generate_batch(target, [request])[0].tokens for request in requests]
    wanted = texts or plain
    whole = [request.prompt + text for request, text in zip(requests, wanted, strict=True)]
    drafter = PartlyRight(whole, target.passes.verifies_trees)
    alone = [generate_batch(target, [request], drafter)[0].tokens for request in requests]
    together = [each.tokens for each in generate_batch(target, requests, drafter)]
    for way, written in {"plain": plain, "alone": alone, "batch": together}.items():
        for what, text, other in zip(("one image", "two images", "text"), written, wanted, strict=False):
            if text != other:
                yield f"{'greedy' if texts else 'T = 1'} {way} ({what})"


def main() -> None:
    table = FamilyTable.packaged()
    tried = {name for name, family in table.families.items() if family.is_target and name in MAKERS}
    found = {name: after_images(with_images(name)) if name in tried else None for name in table.families}
    families = {name: replace(family, images=found[name]) for name, family in table.families.items()}
    write_files(replace(table, families=families))


if __name__ == "__main__":
    main()
