"""The hidden states of texts, from a model in memory that is only read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headstart.data_pipelines.features.batches import length_buckets
from headstart.heads.target_config import TargetConfig
from headstart.heads.target_ends import final_norm
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.passes import keep_input, keep_output, one_stream

TEXTS, PASS_TOKENS = 8, 2**13  # texts of a pass, or more up to so many tokens


def record(model: PreTrainedModel, texts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> list[Tensor]:
    """The taps of each text and its last hidden state before the final norm, on the CPU. [tokens, (taps + 1) * hidden]

    The model's mode, gradients and hooks are afterwards as they were. Raises ValueError for weights in slices (FSDP,
    ZeRO-3), and, naming a tensor, for weights or states that are not finite.
    """
    sliced = [name for name, each in model.named_parameters() if isinstance(each, DTensor) or hasattr(each, "ds_id")]
    if sliced:
        remedy = "a whole model is allowed; save its weights, and give that folder as target"
        raise ValueError(f"target: {sliced[0]} is one slice of several (FSDP, ZeRO-3), {remedy}")
    lengths, found = [len(text) for text in texts], dict[int, Tensor]()
    with reading(model, taps) as hidden, torch.no_grad():
        for numbers in length_buckets(lengths, TEXTS, PASS_TOKENS):
            longest = max(lengths[number] for number in numbers)
            rows = [[*texts[number], *[0] * (longest - lengths[number])] for number in numbers]  # read after the text
            tokens = torch.tensor(rows, device=model.device)
            model(input_ids=tokens, use_cache=False)
            parts = [one_stream(hidden[tap], tokens).to(model.device) for tap in sorted(hidden)]
            hidden.clear()
            states = torch.cat(parts, dim=-1).cpu()
            for row, number in enumerate(numbers):
                found[number] = states[row, : lengths[number]].clone()
    if not all(bool(states.isfinite().all()) for states in found.values()):
        refuse_not_finite(model)
    return [found[number] for number in range(len(texts))]


@contextmanager
def reading(model: PreTrainedModel, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """In this context the model is in eval mode, and each pass leaves its hidden states here, by tap."""
    layers, last = decoder_layers(model), len(decoder_layers(model))
    norm = final_norm(model, TargetConfig.from_dict(model.config.to_dict()))
    hidden: dict[int, Tensor] = {}
    modes = {module: module.training for module in model.modules()}
    hooks = [layers[tap].register_forward_pre_hook(keep_input(hidden, tap), with_kwargs=True) for tap in taps]
    hooks.append(layers[-1].register_forward_hook(keep_output(hidden, last)))
    if norm is not None:
        hooks.append(norm.register_forward_pre_hook(keep_input(hidden, last), with_kwargs=True))
    try:
        model.eval()
        yield hidden
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training


def refuse_not_finite(model: PreTrainedModel) -> None:
    """Raise ValueError that names the first weight that is not finite, or says that the states are not."""
    broken = (name for name, weight in model.named_parameters() if not bool(weight.isfinite().all()))
    name = next(broken, "a hidden state")
    raise ValueError(f"target: {name} holds NaN or infinity, finite numbers are needed; the head stays as it is")
