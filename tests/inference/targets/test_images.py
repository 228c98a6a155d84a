"""Laws of decoding with images: the text equals `generate`'s with the same pixels, whatever decodes beside it."""

from typing import Any

import pytest
import torch
from scripted import VOCAB, Hidden, Moody
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Images, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import DecodeLoop, generate_batch
from headstart.inference.targets.model import TargetModel

NEW = 24
TEXT_ROW = [5, 6, 7, 8, 5, 6, 7]
IMAGE, OPEN, CLOSE = 60, 61, 62
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "eos_token_id": None, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
QWEN_IDS = {"image_token_id": IMAGE, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "video_token_id": 63}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def qwen3_vl() -> Any:
    tower = QWEN_TOWER | {"deepstack_visual_indexes": [0, 1, 2]}
    return AutoConfig.for_model(
        "qwen3_vl", text_config=TEXT | {"rope_parameters": ROPE}, vision_config=tower, **QWEN_IDS
    )


def qwen3_5() -> Any:
    kinds = ["linear_attention", "full_attention"] * 2
    text = TEXT | {"layer_types": kinds, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text["rope_parameters"] = ROPE | {"partial_rotary_factor": 1.0}
    return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=QWEN_TOWER, **QWEN_IDS)


def gemma3() -> Any:
    text = TEXT | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower |= {"image_size": 16, "patch_size": 4}
    ids = {"image_token_id": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE, "image_token_index": IMAGE}
    return AutoConfig.for_model("gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)


CONFIGS = {"qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5, "gemma3": gemma3}


def build(family: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(CONFIGS[family]())
    return model.eval()


def picture(family: str, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    if family == "gemma3":
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=random)}
    height, width = (4, 8) if seed % 2 else (4, 4)
    grid = torch.tensor([[1, height, width]])
    return {"pixel_values": torch.randn(height * width, 96, generator=random), "image_grid_thw": grid}


def prompt_of(family: str, seeds: tuple[int, ...], more: int = 6) -> tuple[list[int], Images]:
    """Text, then each image with text after it."""
    ids, kinds, tensors = [3, 9, 14], [0, 0, 0], []
    for seed in seeds:
        found = picture(family, seed)
        count = 4 if family == "gemma3" else int(found["image_grid_thw"].prod()) // 4
        ids += [OPEN, *[IMAGE] * count, CLOSE, 7 + seed]
        kinds += [0, *[1] * count, 0, 0]
        tensors.append(found)
    ids += [(place * 5 + 11) % 50 for place in range(more)]
    kinds += [0] * more
    name = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    encoded = {key: torch.cat([each[key] for each in tensors]) for key in tensors[0]}
    encoded |= {"input_ids": torch.tensor([ids]), name: torch.tensor([kinds])}
    return ids, Images.of(encoded, (IMAGE,))


def of_transformers(model: PreTrainedModel, images: Images) -> list[int]:
    ids = images.inputs["input_ids"]
    generate: Any = model.generate
    written = generate(**images.inputs, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return list(written[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("family", CONFIGS)
def test_text_with_images_equals_generate(family: str) -> None:
    model, seeds = build(family), [(1,), (2,), (1, 2), (3, 3, 4)]
    prompts = [prompt_of(family, each) for each in seeds]
    wanted = [of_transformers(model, images) for _, images in prompts]
    assert len({*map(tuple, wanted)}) > 2
    target = TargetModel(model, ())
    plain_text = generate_batch(target, [Request(TEXT_ROW, NEW)])[0].tokens
    requests = [Request(ids, NEW, images=images) for ids, images in prompts]
    mixed = [requests[0], Request(TEXT_ROW, NEW), *requests[1:], Request(TEXT_ROW, NEW)]
    texts = [*([*ids, *rest] for (ids, _), rest in zip(prompts, wanted, strict=True)), [*TEXT_ROW, *plain_text]]
    drafter: Drafter = Hidden(*texts) if target.passes.verifies_trees else Moody(*texts)
    for given in (None, drafter):
        for rows in (1, 3, 16):
            got = [each.tokens for each in generate_batch(target, mixed, given, rows)]
            assert got == [wanted[0], plain_text, *wanted[1:], plain_text]
    assert sum(each.stats.drafting_steps for each in generate_batch(target, requests, drafter)) > 0
    if target.passes.verifies_trees:
        got = [each.tokens for each in generate_batch(target, mixed, drafter, 3, static=True)]
        assert got == [wanted[0], plain_text, *wanted[1:], plain_text]
    sampled = [Request(ids, NEW, Sampling(1.0, seed=7), images=images) for ids, images in prompts]
    alone = [generate_batch(target, [request])[0].tokens for request in sampled]
    lookup = Lookup(Growth(4, 2, 8), ngram=1)
    assert [each.tokens for each in generate_batch(target, sampled, lookup, 3)] == alone


@pytest.mark.parametrize("family", CONFIGS)
def test_prefix_is_reused_only_for_the_same_images(family: str) -> None:
    target = TargetModel(build(family), ())
    ids, images = prompt_of(family, (1,), more=40)
    others = prompt_of(family, (5,), more=40)
    assert others[0][:4] == ids[:4]
    alone = [
        generate_batch(target, [Request(each, NEW, images=those)])[0].tokens for each, those in ((ids, images), others)
    ]
    loop = DecodeLoop(target, prefix_memory=10**8)
    written = run(loop, Request(ids, NEW, images=images))
    assert written.tokens == alone[0]
    same = Images({**others[1].inputs, "input_ids": images.inputs["input_ids"]}, images.end)
    other = run(loop, Request(ids, NEW, images=same))
    assert other.cached_tokens == 0
    assert other.tokens == generate_batch(target, [Request(ids, NEW, images=same)])[0].tokens
    turn = [*ids, *written.tokens, 9, 8, 7]
    again = run(loop, Request(turn, NEW, images=images))
    assert again.cached_tokens >= images.end
    assert again.tokens == generate_batch(target, [Request(turn, NEW, images=images)])[0].tokens
    assert run(loop, Request(ids, NEW)).cached_tokens == 0  # the same tokens without the image


def run(loop: DecodeLoop, request: Request) -> Any:
    number = loop.submit(request)
    for _ in iter(lambda: loop.step() is not None and not loop.idle, False):
        pass
    return loop.generations[number]


def test_image_that_the_target_cannot_read_ends_its_own_text_alone() -> None:
    target = TargetModel(build("qwen3_vl"), ())
    ids, images = prompt_of("qwen3_vl", (1,))
    wanted = generate_batch(target, [Request(ids, NEW, images=images)])[0].tokens
    loop = DecodeLoop(target)
    numbers = [loop.submit(Request(ids, NEW, images=each)) for each in (images, *broken(images), images)]
    while not loop.idle:
        loop.step()
    found = [loop.generations[number] for number in numbers]
    assert [each.finish for each in found] == ["length", "error", "error", "length"]
    assert found[0].tokens == found[3].tokens == wanted


def broken(images: Images) -> list[Images]:
    """Images of another size than their pixels, and of pixels that overflow in the tower."""
    changes = {"image_grid_thw": torch.tensor([[1, 4, 4]])}, {"pixel_values": images.inputs["pixel_values"] * torch.nan}
    return [Images({**images.inputs, **each}, images.end) for each in changes]


def test_later_images_are_read_when_the_first_of_all_were_broken() -> None:
    target = TargetModel(build("qwen3_vl"), ())
    ids, images = prompt_of("qwen3_vl", (1,))
    for each in broken(images):
        with pytest.raises(ValueError, match="images: with a 'qwen3_vl_text' target"):
            generate_batch(target, [Request(ids, NEW, images=each)])
    assert len(generate_batch(target, [Request(ids, NEW, images=images)])[0].tokens) == NEW


def test_images_are_refused_by_name_by_a_target_without_a_tower() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**TEXT)
    target = TargetModel(LlamaForCausalLM(config).eval(), ())
    ids, images = prompt_of("gemma3", (1,))
    with pytest.raises(ValueError, match="no image tower"):
        generate_batch(target, [Request(ids, NEW, images=images)])


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_tokens_after_images_have_the_same_bits_in_every_pass(family: str) -> None:
    model: Any = build(family)
    target = TargetModel(model.to(torch.bfloat16), ())
    target.speed_up(lambda: target)
    ids, images = prompt_of(family, (1, 2), more=40)
    plain = Request(ids, NEW, images=images, logprobs=True, keep_logits=True)
    wanted = generate_batch(target, [plain])[0]
    texts = [*ids, *wanted.tokens], [*TEXT_ROW, *generate_batch(target, [Request(TEXT_ROW, NEW)])[0].tokens]
    loop = DecodeLoop(target, Hidden(*texts), prefix_memory=10**8, prefill_chunk=17)
    for cached in (False, True):
        numbers = [loop.submit(Request(TEXT_ROW, NEW)), loop.submit(plain)]
        while not loop.idle:
            loop.step()
        found = loop.generations[numbers[1]]
        assert bool(found.cached_tokens) == cached
        assert torch.equal(torch.cat(found.logits), torch.cat(wanted.logits))
