"""Laws of a new head's first weights: they predict the target's next hidden state, and the first loss is no guess."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch.testing import assert_close

from headstart.heads.least_squares import RIDGE, LeastSquares
from headstart.recipes import Recipe
from headstart.trainers.run import run

MakeRecipe = Callable[..., Recipe]


def test_sums_over_batches_give_the_ridge_regression_of_all_pairs() -> None:
    """At the optimum the gradient vanishes: X^T (X W - Y) + n ridge W = 0, with Y scaled to directions."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(50, size, generator=generator) for size in (6, 4))
    fit = LeastSquares(6, 4)
    for part in (slice(0, 20), slice(20, 50)):
        fit.add(inputs[part], 7 * outputs[part])
    weight, size = fit.solve()
    directions = outputs / outputs.square().mean(-1, keepdim=True).sqrt()
    predicted = inputs @ weight.T
    gradient = inputs.T @ (predicted - directions) + 50 * RIDGE * weight.T
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)
    assert math.isclose(size, float(predicted.square().mean().sqrt()), rel_tol=1e-4)


def test_an_exact_map_is_found() -> None:
    inputs, true = torch.randn(400, 6), torch.randn(4, 6)
    fit = LeastSquares(6, 4)
    fit.add(inputs, inputs @ true.T)
    weight, size = fit.solve()
    cosine = torch.cosine_similarity(inputs @ weight.T, inputs @ true.T, dim=-1)
    assert cosine.mean() > 0.9
    assert 0.8 < size <= 1


def test_the_first_loss_of_an_eagle_3_head_is_below_that_of_the_uniform_distribution(
    harvested: Path, make_recipe: MakeRecipe
) -> None:
    """It was twice that of the uniform distribution on a chat model: 17.7 against 9.0 nats."""
    recipe = make_recipe("run", "train.steps=1", "train.log_every=1", "train.warmup_steps=0")
    run(recipe)
    first = json.loads(recipe.metrics_path.read_text().splitlines()[0])
    vocab_size = json.loads((harvested / "target" / "config.json").read_text())["vocab_size"]
    assert first["train/loss_0"] < math.log(vocab_size)
