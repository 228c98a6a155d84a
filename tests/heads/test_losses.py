"""Laws of the objectives: each matches its formula, is minimal where q equals p and has correct, finite gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart.heads.losses import (
    OBJECTIVES,
    acceptance,
    blended_acceptance,
    feature_distance,
    forward_kl,
    log_acceptance,
    reverse_kl,
    soft_cross_entropy,
    total_variation,
)

Loss = Callable[[Tensor, Tensor], Tensor]
DIVERGENCES: list[Loss] = [forward_kl, reverse_kl, total_variation, log_acceptance, blended_acceptance]
POSITIONS, VOCAB = 40, 9


def log_probabilities(scale: float = 2.0) -> Tensor:
    return (torch.randn(POSITIONS, VOCAB, dtype=torch.float64) * scale).log_softmax(-1)


def written_out(name: str, q: list[float], p: list[float]) -> float:
    """The formulas, summed token by token."""
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


@pytest.mark.parametrize("loss", [soft_cross_entropy, acceptance, *DIVERGENCES])
def test_each_loss_matches_its_formula(loss: Loss) -> None:
    log_q, log_p = log_probabilities(), log_probabilities()
    wanted = [written_out(loss.__name__, q, p) for q, p in zip(log_q.exp().tolist(), log_p.exp().tolist(), strict=True)]
    torch.testing.assert_close(loss(log_q, log_p), torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", [soft_cross_entropy, *DIVERGENCES])
def test_each_loss_is_smallest_where_q_equals_p(loss: Loss) -> None:
    """There a divergence is zero, cross-entropy is p's entropy, and each token is accepted."""
    log_q, log_p = log_probabilities(), log_probabilities()
    entropy, zeros = -(log_p.exp() * log_p).sum(-1), torch.zeros(POSITIONS, dtype=torch.float64)
    least = entropy if loss is soft_cross_entropy else zeros
    torch.testing.assert_close(loss(log_p, log_p), least)
    assert (loss(log_q, log_p) > least + 1e-3).all()
    torch.testing.assert_close(acceptance(log_p, log_p), torch.ones_like(zeros))


@pytest.mark.parametrize("loss", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_matches_finite_differences(loss: Loss) -> None:
    """With respect to the head's logits; no gradient flows through a blend's share, so it is held fixed here."""
    logits = torch.randn(6, VOCAB, dtype=torch.float64, requires_grad=True)
    log_p = log_probabilities()[:6]

    def of_logits(logits: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        if loss is not blended_acceptance:
            return loss(log_q, log_p)
        share = (-3 * acceptance(fixed, log_p)).exp()
        return share * forward_kl(log_q, log_p) + (1 - share) * total_variation(log_q, log_p)

    fixed = logits.detach().log_softmax(-1)
    assert torch.autograd.gradcheck(of_logits, logits)
    [wanted] = torch.autograd.grad(of_logits(logits).sum(), logits)
    [found] = torch.autograd.grad(loss(logits.log_softmax(-1), log_p).sum(), logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("loss", OBJECTIVES.values(), ids=OBJECTIVES)
def test_one_teacher_is_broadcast_over_the_unroll_steps(loss: Loss) -> None:
    """q [steps, positions, vocab] against p [positions, vocab] gives the same as step by step."""
    log_q, log_p = torch.stack([log_probabilities() for _ in range(3)]), log_probabilities()
    together = loss(log_q, log_p)
    assert together.shape == (3, POSITIONS)
    torch.testing.assert_close(together, torch.stack([loss(step, log_p) for step in log_q]))


@pytest.mark.parametrize("loss", OBJECTIVES.values(), ids=OBJECTIVES)
def test_distributions_without_common_tokens_give_a_finite_gradient(loss: Loss) -> None:
    """In float32 exp(-200) is zero, yet a head far from its target must still get a usable gradient."""
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    log_p = torch.tensor([[0.0, 200.0, 0.0]]).log_softmax(-1)
    value = loss(logits.log_softmax(-1), log_p).sum()
    [gradient] = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()
    if loss not in (reverse_kl, total_variation):  # these weight a token's gradient by its q, which is zero here
        assert gradient[0, 1] < 0


def test_the_feature_distance_is_smooth_l1() -> None:
    """Half the square up to 1, the distance minus one half beyond; averaged over the entries."""
    feature = torch.zeros(2, 4)
    hidden = torch.tensor([[0.5, -0.5, 0.0, 0.0], [3.0, -1.0, 0.0, 0.0]])
    torch.testing.assert_close(feature_distance(hidden, feature), torch.tensor([0.25 / 4, (2.5 + 0.5) / 4]))
    assert not feature_distance(hidden, hidden).any()
    assert torch.autograd.gradcheck(
        lambda hidden: feature_distance(hidden, feature.double()), hidden.double().requires_grad_() + 0.1
    )
