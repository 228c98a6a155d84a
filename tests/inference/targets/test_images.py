"""Laws of decoding with images: the text equals `generate`'s with the same pixels, whatever decodes beside it."""

from pathlib import Path
from typing import Any

import pytest
import seeing_target
import torch
from families import GROUPED
from matrix import slow, slow_unless
from scripted import Hidden, Moody, answered, finish
from seeing_target import ROPE
from tiny_run import ENDS, VOCAB_SIZE, build_run, build_tokenizer, tiny_recipe
from transformers import AutoConfig, AutoModelForImageTextToText

from headstart.heads.kinds.checkpoint import load_head
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.request import Images, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import DecodeLoop, generate_batch
from headstart.inference.targets.loading import load_weights, model_without_weights
from headstart.inference.targets.model import TargetModel
from headstart.trainers import train as run

NEW = 6
TEXT_ROW = [5, 6, 7, 8, 5, 6, 7]
IMAGE, OPEN, CLOSE = 60, 61, 62
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4}
QWEN_TOWER = {**seeing_target.TOWER, "depth": 2}
QWEN_IDS = {"image_token_id": IMAGE, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "video_token_id": 63}
FAMILIES = ["qwen3_vl", "qwen3_5", "gemma3"]


def build(family: str, **changes: Any) -> Any:
    """A random target that reads images; `changes` are those of its language model's configuration."""
    text: dict[str, Any] = {**GROUPED, "max_position_embeddings": 512, "initializer_range": 0.3, **changes}
    ids: dict[str, Any] = QWEN_IDS
    match family:
        case "qwen3_vl":
            text, tower = text | {"rope_parameters": ROPE}, QWEN_TOWER | {"deepstack_visual_indexes": [0, 1]}
        case "qwen3_5":
            text |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
            text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
            text, tower = text | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, QWEN_TOWER
        case "gemma3":
            text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
            ids = {"image_token_id": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE}
            ids |= {"image_token_index": IMAGE, "mm_tokens_per_image": 4}
            tower = TOWER | {"image_size": 16}
        case "llava":
            text, ids = text | {"model_type": "llama"}, {"image_token_index": 1}
            tower = TOWER | {"image_size": 8, "model_type": "clip_vision_model"}
    config = AutoConfig.for_model(family, text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval()


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


def of_transformers(model: Any, images: Images) -> list[int]:
    ids = images.inputs["input_ids"]
    written = model.generate(**images.inputs, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return list(written[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_with_images_equals_generate(family: str) -> None:
    model, seeds = build(family), [(1,), (3, 3, 4)]
    prompts = [prompt_of(family, each) for each in seeds]
    wanted = [of_transformers(model, images) for _, images in prompts]
    assert wanted[0] != wanted[1]
    target = TargetModel(model, ())
    plain_text = generate_batch(target, [Request(TEXT_ROW, NEW)])[0].tokens
    requests = [Request(ids, NEW, images=images) for ids, images in prompts]
    mixed = [requests[0], Request(TEXT_ROW, NEW), *requests[1:], Request(TEXT_ROW, NEW)]
    texts = [*([*ids, *rest] for (ids, _), rest in zip(prompts, wanted, strict=True)), [*TEXT_ROW, *plain_text]]
    drafter: Drafter = Hidden(*texts) if target.passes.verifies_trees else Moody(*texts)
    static = [(drafter, 3, True)] if target.passes.verifies_trees else []
    for given, rows, is_static in [(None, 16, False), (drafter, 3, False), *static]:
        found = generate_batch(target, mixed, given, rows, is_static)
        assert [each.tokens for each in found] == [wanted[0], plain_text, *wanted[1:], plain_text]
        assert sum(each.stats.drafting_steps for each in found) > 0 or given is None
    sampled = [Request(ids, NEW, Sampling(1.0, seed=7), images=images) for ids, images in prompts]
    alone = [generate_batch(target, [request])[0].tokens for request in sampled]
    lookup = Lookup(Growth(4, 2, 8), ngram=1)
    assert [each.tokens for each in generate_batch(target, sampled, lookup, 3)] == alone


@pytest.mark.parametrize("family", slow_unless(("qwen3_vl", "qwen3_5"), FAMILIES))
def test_prefix_is_reused_only_for_the_same_images(family: str) -> None:
    target = TargetModel(build(family), ())
    ids, images = prompt_of(family, (1,), more=40)
    others = prompt_of(family, (5,), more=40)
    assert others[0][:4] == ids[:4]
    loop = DecodeLoop(target, prefix_memory=10**8)
    written = answered(loop, Request(ids, NEW, images=images))
    assert written.tokens == generate_batch(target, [Request(ids, NEW, images=images)])[0].tokens
    same = Images({**others[1].inputs, "input_ids": images.inputs["input_ids"]}, images.end)
    other = answered(loop, Request(ids, NEW, images=same))
    assert other.cached_tokens == 0
    assert other.tokens == generate_batch(target, [Request(ids, NEW, images=same)])[0].tokens
    turn = [*ids, *written.tokens, 9, 8, 7]
    again = answered(loop, Request(turn, NEW, images=images))
    assert again.cached_tokens >= images.end
    assert again.tokens == generate_batch(target, [Request(turn, NEW, images=images)])[0].tokens
    assert answered(loop, Request(ids, NEW)).cached_tokens == 0  # the same tokens without the image


def broken(images: Images) -> list[Images]:
    """Images of another size than their pixels, and of pixels that overflow in the tower."""
    changes = {"image_grid_thw": torch.tensor([[1, 4, 4]])}, {"pixel_values": images.inputs["pixel_values"] * torch.nan}
    return [Images({**images.inputs, **each}, images.end) for each in changes]


def test_images_that_the_target_cannot_read_end_their_own_texts_alone_even_as_the_first_of_all() -> None:
    target = TargetModel(build("qwen3_vl"), ())
    ids, images = prompt_of("qwen3_vl", (1,))
    for each in broken(images):
        with pytest.raises(ValueError, match="images: with a 'qwen3_vl_text' target"):
            generate_batch(target, [Request(ids, NEW, images=each)])
    wanted = generate_batch(target, [Request(ids, NEW, images=images)])[0].tokens
    loop = DecodeLoop(target)
    for each in (images, *broken(images), images):
        loop.submit(Request(ids, NEW, images=each))
    finish(loop)
    found = [*loop.generations.values()]
    assert [each.finish for each in found] == ["length", "error", "error", "length"]
    assert found[0].tokens == found[3].tokens == wanted


@pytest.mark.parametrize("family", [slow("qwen3_vl"), "gemma3"])
def test_tokens_after_images_have_the_same_bits_in_every_pass(family: str) -> None:
    target = TargetModel(build(family).to(torch.bfloat16), ())
    target.speed_up(lambda: target)
    ids, images = prompt_of(family, (1, 2), more=40)
    plain = Request(ids, NEW, images=images, logprobs=True, keep_logits=True)
    wanted = generate_batch(target, [plain])[0]
    texts = [*ids, *wanted.tokens], [*TEXT_ROW, *generate_batch(target, [Request(TEXT_ROW, NEW)])[0].tokens]
    loop = DecodeLoop(target, Hidden(*texts), prefix_memory=10**8, prefill_chunk=17)
    for cached in (False, True):
        numbers = [loop.submit(Request(TEXT_ROW, NEW)), loop.submit(plain)]
        finish(loop)
        found = loop.generations[numbers[1]]
        assert bool(found.cached_tokens) == cached
        assert torch.equal(torch.cat(found.logits), torch.cat(wanted.logits))


def save(family: str, folder: Path) -> Any:
    model = build(family, vocab_size=VOCAB_SIZE, eos_token_id=ENDS)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", slow_unless(["qwen3_5"], ["gemma3", "llava", "qwen3_5"]))
def test_a_loaded_model_gives_the_logits_of_the_whole_one_to_text(family: str, tmp_path: Path) -> None:
    whole = save(family, tmp_path)
    loaded = load_weights(tmp_path, dtype=torch.float32, trust_remote_code=False)
    tokens = torch.tensor([[5, 6, 7, 11, 3, 30]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, whole(input_ids=tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_5"])
def test_a_head_is_trained_for_its_language_model(family, tmp_path, capsys) -> None:
    build_run(tmp_path)
    whole = save(family, tmp_path / "target")
    recipe = tiny_recipe(tmp_path, "decode.growth=chain")
    assert model_without_weights(recipe.target).num_parameters() == whole.num_parameters()
    run(recipe)
    said = capsys.readouterr().out
    assert said.count(f"{tmp_path}/target reads more than text; its heads are trained on text alone\n") == 1
    head = load_head(recipe.head_dir, recipe.target.path)
    assert torch.equal(head.embedding, whole.get_input_embeddings().state_dict()["weight"])
