"""Laws of targets that also read images, when they read text alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import ENDS, VOCAB_SIZE, build_run, build_tokenizer, tiny_recipe
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from headstart.heads.kinds.checkpoint import load_head
from headstart.inference.targets.loading import load_weights, model_without_weights
from headstart.trainers import run

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": ENDS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
LINEAR, FULL = "linear_attention", "full_attention"


def gemma3() -> Any:
    text = TEXT | {
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
        "sliding_window": 16,
    }
    return AutoConfig.for_model("gemma3", text_config=text, vision_config=TOWER, mm_tokens_per_image=4)


def llava() -> Any:
    text, vision = TEXT | {"model_type": "llama"}, TOWER | {"model_type": "clip_vision_model"}
    return AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=1)


def qwen3_5() -> Any:
    text = TEXT | {"layer_types": [LINEAR, LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL], "linear_num_value_heads": 4}
    text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)


def save(config: Any, folder: Path) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    model.eval().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("make", [gemma3, llava, qwen3_5])
def test_the_loaded_model_gives_the_logits_of_the_whole_one(make: Callable[[], Any], tmp_path: Path) -> None:
    whole = save(make(), tmp_path)
    loaded = load_weights(tmp_path, dtype=torch.float32, trust_remote_code=False)
    tokens = torch.tensor([[5, 6, 7, 11, 3, 30]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, whole(input_ids=tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gemma3, llava, qwen3_5])
def test_a_head_is_trained_for_its_language_model(
    make: Callable[[], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_run(tmp_path)
    whole = save(make(), tmp_path / "target")
    recipe = tiny_recipe(tmp_path, "decode.growth=chain")
    assert model_without_weights(recipe.target).num_parameters() == whole.num_parameters()
    run(recipe)
    said = capsys.readouterr().out
    assert said.count(f"{tmp_path}/target reads more than text; its heads are trained on text alone\n") == 1
    head = load_head(recipe.head_dir, recipe.target.path)
    assert torch.equal(head.embedding, whole.get_input_embeddings().state_dict()["weight"])
