"""Laws of the objectives: each matches its formula and has finite gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart.heads import losses

Loss = Callable[[Tensor, Tensor], Tensor]
NAMES = [*dict.fromkeys(["soft_cross_entropy", "acceptance", *losses.OBJECTIVES])]
POSITIONS, VOCAB = 40, 9


def log_probabilities(scale: float = 2.0) -> Tensor:
    return (torch.randn(POSITIONS, VOCAB, dtype=torch.float64) * scale).log_softmax(-1)


def written_out(name: str, q: list[float], p: list[float]) -> float:
    log = [float(value) for value in torch.tensor(p, dtype=torch.float64).log()]
    log_own = [float(value) for value in torch.tensor(q, dtype=torch.float64).log()]
    accepted = sum(min(p[i], q[i]) for i in range(VOCAB))
    kl = sum(p[i] * (log[i] - log_own[i]) for i in range(VOCAB))
    variation = sum(abs(p[i] - q[i]) for i in range(VOCAB)) / 2
    share = 2.718281828459045 ** (-3 * accepted)
    return {
        "soft_cross_entropy": -sum(p[i] * log_own[i] for i in range(VOCAB)),
        "forward_kl": kl,
        "reverse_kl": sum(q[i] * (log_own[i] - log[i]) for i in range(VOCAB)),
        "acceptance": accepted,
        "total_variation": variation,
        "log_acceptance": -float(torch.tensor(accepted, dtype=torch.float64).log()),
        "blended_acceptance": share * kl + (1 - share) * variation,
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_matches_its_formula(name: str) -> None:
    log_q, log_p = log_probabilities(), log_probabilities()
    wanted = [written_out(name, q, p) for q, p in zip(log_q.exp().tolist(), log_p.exp().tolist(), strict=True)]
    found = vars(losses)[name](log_q, log_p)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_no_gradient_flows_through_the_share_of_a_blend() -> None:
    log_q, log_p = log_probabilities().requires_grad_(), log_probabilities()
    share = (-3 * losses.acceptance(log_q, log_p)).exp().detach()
    wanted = share * losses.forward_kl(log_q, log_p) + (1 - share) * losses.total_variation(log_q, log_p)
    gradients = [torch.autograd.grad(loss.sum(), log_q) for loss in (losses.blended_acceptance(log_q, log_p), wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", losses.OBJECTIVES.values(), ids=losses.OBJECTIVES)
def test_distributions_without_common_tokens_give_a_finite_gradient(loss: Loss) -> None:
    """In float32 exp(-200) is zero, yet a head far from its target must still get a usable gradient."""
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    log_p = torch.tensor([[0.0, 200.0, 0.0]]).log_softmax(-1)
    value = loss(logits.log_softmax(-1), log_p).sum()
    [gradient] = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()
    if loss not in (losses.reverse_kl, losses.total_variation):  # they weight a token's gradient by its q, here zero
        assert gradient[0, 1] < 0
