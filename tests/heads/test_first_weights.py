"""Laws of a new head's first weights: they predict the target's next hidden state, and the first loss is no guess."""

import json
import math

import torch
from torch.testing import assert_close

from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.kinds.linear_start import RIDGE, LeastSquares
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import Eagle3Section
from headstart.trainers import run


def test_sums_over_batches_give_the_ridge_regression_of_all_pairs() -> None:
    """At the optimum the gradient vanishes: X^T (X W - Y) + n ridge W = 0."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(50, size, generator=generator) for size in (6, 4))
    fit = LeastSquares()
    for part in (slice(0, 20), slice(20, 50)):
        fit.add(inputs[part], outputs[part])
    weight = fit.solve().float()
    gradient = inputs.T @ (inputs @ weight - outputs) + 50 * RIDGE * weight
    assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)
    assert math.isclose(fit.size(fit.solve()), float((inputs @ weight).square().mean().sqrt()), rel_tol=1e-4)


def test_a_head_starts_as_the_fitted_map(frozen: FrozenTarget) -> None:
    """With one token in sight attention is on it alone, so the normed state is exactly what the map predicts."""
    config = frozen.config
    num_heads = -(-config.hidden_size // config.head_dim)  # so many key heads that nothing is lost to a low rank
    section = Eagle3Section(kind="eagle3", norms=True, num_heads=num_heads, num_kv_heads=num_heads)
    head = new_head(section, frozen, DraftVocab.full(config.vocab_size), 0)
    assert isinstance(head, Eagle3Head)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(500, head.fc.in_features, generator=generator)
    tokens = torch.randint(config.vocab_size, (500,), generator=generator)
    with torch.no_grad():
        inputs = head.linear_inputs(taps, tokens)
        fit = LeastSquares()
        fit.add(inputs, inputs @ torch.randn(inputs.shape[1], config.hidden_size, generator=generator))
        head.start_with_fit(fit, generator)
        hidden = head(head.project(taps).unsqueeze(1), tokens.unsqueeze(1), torch.zeros(500, 1, dtype=torch.long))
        found = head.norm(hidden)[:, 0]
    predicted = inputs @ fit.solve().float()
    wanted = fit.size(fit.solve()) * predicted / predicted.square().mean(-1, keepdim=True).sqrt()
    assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_first_loss_of_an_eagle_3_head_is_below_that_of_the_uniform_distribution(harvested, make_recipe):
    recipe = make_recipe("run", "train.fitted_start=true", "train.steps=1", "train.warmup_steps=0")
    run(recipe)
    first = json.loads(recipe.metrics_path.read_text().splitlines()[0])
    vocab_size = json.loads((harvested / "target" / "config.json").read_text())["vocab_size"]
    assert first["train/loss_0"] < math.log(vocab_size)
