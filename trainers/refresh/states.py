"""The hidden states of texts, from a model in memory that is only read."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headstart.data_pipelines.features.batches import length_buckets
from headstart.heads.target_config import TargetConfig
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.passes import keep_hidden, one_stream

TEXTS, PASS_TOKENS = 8, 2**13  # texts of a pass, or more up to so many tokens


@torch.no_grad()
def record(model: PreTrainedModel, texts: Sequence[Sequence[int]], taps: tuple[int, ...]) -> list[Tensor]:
    """The taps of each text and its last hidden state before the final norm, on the CPU. [tokens, (taps + 1) * hidden]

    The model's mode, gradients and hooks are afterwards as they were. Raises ValueError for weights in slices (FSDP,
    ZeRO-3), and, naming a tensor, for weights or states that are not finite.
    """
    sliced = [name for name, each in model.named_parameters() if isinstance(each, DTensor) or hasattr(each, "ds_id")]
    if sliced:
        remedy = "a whole model is allowed; save its weights, and give that folder as target"
        raise ValueError(f"target: {sliced[0]} is one slice of several (FSDP, ZeRO-3), {remedy}")
    lengths, config = [len(text) for text in texts], TargetConfig.from_dict(model.config.to_dict())
    hidden, found = dict[int, Tensor](), dict[int, Tensor]()  # by tap, by text
    modes = {module: module.training for module in model.modules()}
    hooks = keep_hidden(hidden, model, config, taps, decoder_layers(model))
    try:
        model.eval()
        for numbers in length_buckets(lengths, TEXTS, PASS_TOKENS):
            longest = max(lengths[number] for number in numbers)
            rows = [[*texts[number], *[0] * (longest - lengths[number])] for number in numbers]  # read after the text
            tokens = torch.tensor(rows, device=model.device)
            model(input_ids=tokens, use_cache=False)
            states = torch.cat([one_stream(hidden[tap], tokens).to(model.device) for tap in sorted(hidden)], -1).cpu()
            hidden.clear()
            for row, number in enumerate(numbers):
                found[number] = states[row, : lengths[number]].clone()
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    if not all(bool(states.isfinite().all()) for states in found.values()):
        refuse_not_finite(model)
    return [found[number] for number in range(len(texts))]


def refuse_not_finite(model: PreTrainedModel) -> None:
    """Raise ValueError that names the first weight that is not finite, or says that the states are not."""
    broken = (name for name, weight in model.named_parameters() if not bool(weight.isfinite().all()))
    name = next(broken, "a hidden state")
    raise ValueError(f"target: {name} holds NaN or infinity, finite numbers are needed; the head stays as it is")
