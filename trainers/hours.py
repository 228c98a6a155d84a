"""The hours of a run by arithmetic: what a token costs in each stage, at the speed of one measured H100."""

from dataclasses import dataclass

from rich.filesize import decimal
from torch import nn

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import MANIFEST, FeatureStore, stored_taps
from headstart.data_pipelines.prompts.rows import most_samples
from headstart.heads.base import DraftHead
from headstart.inference.engine.budget import StepMemory
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import model_without_weights
from headstart.recipes import Recipe
from headstart.trainers.memory import RunMemory, num_parameters

# The speed of the H100 of 80 GB that was measured (docs/gpu.md). Harvest and training wait for matrix products, at 58 %
# of that card's limit; decoding waits for weights and cache to be read, at 60 % of the rate at which it copies.
OPERATIONS = 578e12  # floating-point operations a second, in bfloat16
READ = 1.78e12  # bytes of weights and cache a second
ROW = 55e-6  # seconds of a decode step for each of its texts: logits, sampling, the loop
SUM = 20e-6  # seconds of a sum over the cards of a target, of which a layer has two; assumed, not measured
BACKWARD = 3  # how many times the operations of its forward pass a training step takes


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in each stage of a run, whatever the number of tokens and cards."""

    weights: int  # bytes that a decode step reads for all of its texts together
    cached: int  # bytes that it reads for each token before, of each text
    layers: int
    forward: float  # operations of the target's layers
    logits: float  # of its output layer
    training: float  # of a training step
    stored: int  # bytes of its features

    @classmethod
    def of(cls, recipe: Recipe, head: DraftHead) -> "TokenCost":
        target, model = head.target, model_without_weights(recipe.target)
        layers, step = decoder_layers(model), StepMemory.of(target, model.dtype)
        of_output = target.hidden_size * target.vocab_size
        again = [*head.logits_parameters, *(each for layer in head.decoder_layers for each in layer.parameters())]
        depths = recipe.unroll if head.repeats_layers else 1  # that run the same weights again
        looked_up = sum(each.weight.numel() for each in head.modules() if isinstance(each, nn.Embedding))
        multiplied = num_parameters(head) - looked_up + (depths - 1) * sum(weight.numel() for weight in again)
        taps = stored_taps(head.taps, target.num_layers)
        return cls(
            weights=(num_parameters(layers) + of_output) * step.element,
            cached=step.cached,
            layers=len(layers),
            forward=2.0
            * multiplied_weights(layers, getattr(model.config.get_text_config(), "num_experts_per_tok", None)),
            logits=2.0 * of_output,
            training=BACKWARD * 2.0 * multiplied + 2.0 * of_output,
            stored=bytes_per_token(target.hidden_size, len(taps), recipe.data.dtype),
        )

    def decode_step(self, texts: int, context: float, cards: int = 1) -> float:
        """Seconds of a plain step of `texts` texts of `context` tokens, on a target that so many cards share."""
        read = (self.weights + texts * context * self.cached) / (cards * READ)
        computed = texts * (self.forward + self.logits) / (cards * OPERATIONS)
        return read + computed + texts * ROW + (2 * self.layers * SUM if cards > 1 else 0.0)

    def responses(self, tokens: float, texts: int, context: float, cards: int = 1) -> float:
        """Card seconds of written tokens, by steps of `texts` texts of `context` tokens on average."""
        return tokens * cards * self.decode_step(texts, context, cards) / texts

    def features(self, tokens: float) -> float:
        """Card seconds of reading texts once."""
        return tokens * self.forward / OPERATIONS

    def steps(self, tokens: float) -> float:
        """Card seconds of training on so many tokens, those of later epochs counted again."""
        return tokens * self.training / OPERATIONS


def multiplied_weights(layers: nn.ModuleList, chosen: int | None) -> float:
    """The weights of layers that a token meets: of experts, which are stacked, as many as are `chosen` for it."""
    found = 0.0
    for module in layers.modules():
        is_stack = type(module).__name__.endswith("Experts")
        for weight in module.parameters(recurse=False):
            found += weight.numel() * (1 if chosen is None or not is_stack else chosen / weight.shape[0])
    return found


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the training split: measured if it is on disk, otherwise the largest that the recipe allows."""

    is_measured: bool
    samples: int
    tokens: int
    stored: int  # bytes of both splits

    @classmethod
    def of(cls, memory: RunMemory) -> "DataSizes":
        recipe, data = memory.recipe, memory.recipe.data
        folder = data.store or recipe.features_dir
        if data.online is None and (folder / MANIFEST).is_file():
            store, heldout = (FeatureStore(folder, split) for split in ("train", "heldout"))
            stored = sum(shard["bytes"] for shard in (*store.shards, *heldout.shards))
            return cls(True, len(store), store.num_tokens, stored)
        target, samples = memory.head.target, most_samples(data)
        taps = len(stored_taps(memory.head.taps, target.num_layers))
        per_token = 0 if data.online else bytes_per_token(target.hidden_size, taps, data.dtype)
        stored = per_token * (samples + data.heldout_samples) * data.longest_sample
        return cls(False, samples, samples * data.longest_sample, stored)


def time_rows(memory: RunMemory) -> list[tuple[str, str, str]]:
    """The hours of each stage, were every GPU an H100, and what disks must deliver to training."""
    recipe, machine, data = memory.recipe, memory.machine, DataSizes.of(memory)
    section, split, cost = recipe.data, recipe.target.split, TokenCost.of(recipe, memory.head)
    sharing = machine.devices_of_target(split)
    # GPUs with layers of their own compute one after another.
    abreast, waiting = (sharing, 1) if split == "tensor" else (1, sharing)
    cards, texts, mean = max(machine.ranks, sharing), section.generate_batch, data.tokens / max(data.samples, 1)
    stages: list[tuple[str, float, int, str]] = []  # name, seconds of GPUs, on how many, why
    if section.store is None and section.responses == "target" and section.server is None:
        written = data.samples * min(section.response_tokens, mean)
        seconds = waiting * cost.responses(written, texts, mean / 2, abreast)
        stages.append(("responses", seconds, cards, f"{written:,.0f} tokens, {texts} texts at once, at their longest"))
    if section.store is None and section.online is None:
        once = waiting * cost.features(data.tokens)
        stages.append(("features", once, cards, f"{data.tokens:,} tokens"))
    ranks = min(machine.ranks, recipe.train.batch_size)
    seen = recipe.train.steps * recipe.train.batch_size * mean
    seconds = cost.steps(seen) + (0 if section.online is None else waiting * cost.features(seen))
    read = f", which read {decimal(int(cost.stored * seen / seconds * ranks))}/s" if section.online is None else ""
    stages.append(("training", seconds, ranks, f"{seen:,.0f} tokens on {ranks} GPUs{read}"))
    rows = [(f"time: {stage}", f"{seconds / on / 3600:,.2f} h", why) for stage, seconds, on, why in stages]
    spent = sum(seconds for _, seconds, _, _ in stages) / 3600
    return [*rows, ("time of GPUs, in all", f"{spent:,.1f} h", "at the speed of one measured H100: docs/scale.md")]
