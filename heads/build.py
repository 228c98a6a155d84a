"""From a recipe's head section to a head, and from a folder to a head and back."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHead
from heads.eagle3 import Eagle3Head, Eagle3Shape
from heads.frozen import FrozenTarget
from heads.target_config import Rope, TargetConfig
from heads.vocab import DraftVocab
from recipes.schema import HeadSection


def head_taps(section: HeadSection, target: TargetConfig) -> tuple[int, ...]:
    """The recipe's taps, or the places where every engine looks by default."""
    return target.default_taps() if section.taps is None else section.taps


def new_head(section: HeadSection, frozen: FrozenTarget, vocab: DraftVocab, seed: int) -> DraftHead:
    """A head at the start of its training; whatever the recipe leaves open has the target's size."""
    target = frozen.config
    num_heads = section.num_heads or target.num_heads
    shape = Eagle3Shape(
        hidden_size=section.hidden_size or target.hidden_size,
        intermediate_size=section.intermediate_size or target.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=section.num_kv_heads or math.gcd(target.num_kv_heads, num_heads),
        head_dim=target.head_dim,
        taps=head_taps(section, target),
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
    )
    head = Eagle3Head(shape, target, vocab, frozen.embedding)
    head.initialise(frozen, torch.Generator().manual_seed(seed))
    return head


def engine_config(head: Eagle3Head) -> dict[str, Any]:
    """config.json as vLLM, SGLang and TensorRT-LLM read it; each key stands because leaving it out costs acceptance."""
    shape, target = head.shape, head.target
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(head.vocab.ids),
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        **target.rope.to_config(),
        "headstart": {"kind": head.kind, "taps": list(head.taps), "target_num_layers": target.num_layers},
    }
    if head.taps != target.default_taps() or target.num_layers < 7:
        # vLLM counts as Hugging Face does; SGLang names the layer whose output it is, one less.
        config["eagle_aux_hidden_state_layer_ids"] = list(head.taps)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]}
    if len(head.taps) != 3:
        config["num_aux_hidden_states"] = len(head.taps)
    return config


def head_tensors(head: DraftHead) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    return {**tensors, "d2t": head.vocab.offsets(), "t2d": head.vocab.members()}


def save_head(head: DraftHead, folder: Path) -> None:
    """Write config.json and model.safetensors, into a temporary folder first so that no half head is ever seen."""
    assert isinstance(head, Eagle3Head)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(head_tensors(head), partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(engine_config(head), indent=2) + "\n")
    folder.mkdir(exist_ok=True)
    for file in ("model.safetensors", "config.json"):
        (partial / file).replace(folder / file)
    partial.rmdir()


def load_head(folder: Path, target: TargetConfig, embedding: Tensor) -> DraftHead:
    """A saved head for this target, in the embedding's dtype and on its device.

    Raises ValueError naming everything that does not fit: sizes, vocabulary, taps, missing or misshapen tensors.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no head (no config.json); train one with trainers/eagle.py or name its folder"
        )
    config = json.loads(path.read_text())
    own = config.get("headstart", {})
    taps = tuple(own.get("taps") or config.get("eagle_aux_hidden_state_layer_ids") or target.default_taps())
    check_fit(folder, config, taps, target)
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}/model.safetensors cannot be read ({error}); export the head again") from error
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    vocab = DraftVocab.full(target.vocab_size) if d2t is None else DraftVocab.from_offsets(d2t, target.vocab_size)
    if d2t is not None and t2d is not None and not torch.equal(t2d.bool(), vocab.members()):
        raise ValueError(
            f"{folder}/model.safetensors: d2t and t2d name different target tokens; "
            f"d2t must hold offsets: target id minus draft id"
        )
    shape = Eagle3Shape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        taps=taps,
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
    )
    head = Eagle3Head(shape, target, vocab, embedding)
    check_tensors(folder, head, tensors)
    head.load_state_dict(tensors)
    return head.to(embedding.device, embedding.dtype).eval().requires_grad_(False)


def check_fit(folder: Path, config: dict[str, Any], taps: tuple[int, ...], target: TargetConfig) -> None:
    """Every mismatch between a head's config.json and its target, at once and with both values."""
    own, rope = config.get("headstart", {}), Rope.from_config(config)
    facts = {
        "hidden_size": (config.get("target_hidden_size", config.get("hidden_size")), target.hidden_size),
        "vocab_size": (config.get("vocab_size"), target.vocab_size),
        "num_hidden_layers": (own.get("target_num_layers", target.num_layers), target.num_layers),
        "rope": (asdict(rope), asdict(target.rope)),
    }
    wrong = [f"{name}: head {mine}, target {its}" for name, (mine, its) in facts.items() if mine != its]
    if max(taps) > target.num_layers:
        wrong.append(f"taps: head {list(taps)}, target has hidden_states 0 to {target.num_layers}")
    if wrong:
        raise ValueError(f"the head in {folder} does not fit the target: " + "; ".join(wrong) + "; train one for it")


def check_tensors(folder: Path, head: DraftHead, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    wrong += [
        f"{name} is {list(found[name])} and should be {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if wrong:
        raise ValueError(f"{folder}/model.safetensors: " + "; ".join(sorted(wrong)))
