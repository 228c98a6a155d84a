"""The hours that a run takes on GPUs like the one that was measured, an H100 of 80 GB (docs/gpu.md).

Harvest and training wait for matrix products, which ran at 58 % of that card's limit in both; decoding waits for
weights and cache to be read, at 60 % of the rate at which it copies. What it takes cards to share a target is assumed.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from headstart.data_pipelines.features.shard_files import bytes_per_token
from headstart.data_pipelines.features.shards import stored_taps
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import head_taps
from headstart.heads.target_config import TargetConfig
from headstart.inference.engine.budget import StepMemory
from headstart.inference.targets.architecture import decoder_layers
from headstart.inference.targets.loading import model_without_weights
from headstart.recipes import Recipe
from headstart.recipes.schema import MedusaSection

OPERATIONS = 578e12  # floating-point operations a second, in bfloat16
READ = 1.78e12  # bytes of weights and cache a second
ROW = 55e-6  # seconds of a decode step for each of its texts: logits, sampling, the loop
SUM = 20e-6  # seconds of a sum over the cards of a target, of which a layer has two
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
    def of(cls, recipe: Recipe, target: TargetConfig, head: DraftHead) -> "TokenCost":
        model = model_without_weights(recipe.target)
        layers, step = decoder_layers(model), StepMemory.of(target, model.dtype)
        of_output = target.hidden_size * target.vocab_size
        again = [*head.logits_parameters, *(each for layer in head.decoder_layers for each in layer.parameters())]
        depths = 1 if isinstance(recipe.head, MedusaSection) else recipe.unroll  # that run the same weights again
        looked_up = numel(each.weight for each in head.modules() if isinstance(each, nn.Embedding))
        multiplied = numel(head.parameters()) - looked_up + (depths - 1) * numel(again)
        taps = stored_taps(head_taps(recipe.head, target), target.num_layers)
        return cls(
            weights=(numel(layers.parameters()) + of_output) * step.element,
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


def numel(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)
