"""SpecForge's EAGLE-3 training step, with its own model and objective.

Its loss is a Triton kernel that writes the gradient over the logits. Triton does not run on a CPU, so there the loss is
computed with torch in the same way: masked positions are skipped and the gradient reuses the logits' memory.
"""

from typing import Any

import torch
from peers.contender import Case, Inputs, Step, serve
from specforge.algorithms.eagle3 import model as eagle3
from specforge.modeling.draft import LlamaForCausalLMEagle3
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

DECAY = 0.8  # factor of the loss from one unroll step to the next; SpecForge's default


class InPlaceLoss(torch.autograd.Function):
    """Masked soft cross-entropy, averaged over all positions; replaces SpecForge's `LogSoftmaxLoss`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        flat, wanted = logits.detach().flatten(0, 1), target.flatten(0, 1)  # [positions, draft_vocab]
        rows = position_mask.flatten().nonzero().squeeze(1)
        log_q = flat[rows].log_softmax(-1)
        ctx.save_for_backward(flat, log_q, wanted, rows)
        ctx.shape = logits.shape
        return -(wanted[rows] * log_q).sum() / len(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, log_q, wanted, rows = ctx.saved_tensors
        flat.zero_()
        flat[rows] = (log_q.exp() - wanted[rows]) * (gradients[0] / len(flat))
        return flat.view(ctx.shape), None, None


def make_step(case: Case, inputs: Inputs) -> Step:
    on_cpu = case.device == "cpu"
    attention = "sdpa" if on_cpu else "flex_attention"
    if on_cpu:
        eagle3.LogSoftmaxLoss = InPlaceLoss
    sizes: dict[str, Any] = {
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "vocab_size": case.vocab,
        "draft_vocab_size": case.draft_vocab,
        "max_position_embeddings": case.seq + case.unroll,
        "pad_token_id": 0,
    }
    config = LlamaConfig(**sizes)
    draft = LlamaForCausalLMEagle3(config, attention_backend=attention).to(case.device, case.torch_dtype)
    draft.freeze_embedding()
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(inputs.embedding)
        draft.t2d.copy_(torch.arange(case.vocab) < case.draft_vocab)  # d2t, the offsets, are zeros
    model = eagle3.OnlineEagle3Model(draft, length=case.unroll, attention_backend=attention)

    # Index t holds the features of token t and token t + 1, and is scored against the target's choice after that.
    shifted = [functional.pad(each[:, 1:], (0, 1)) for each in (inputs.tokens, inputs.loss_mask.long())]
    last_hidden = functional.pad(inputs.last_hidden[:, 1:], (0, 0, 0, 1))
    attention_mask = torch.ones_like(inputs.tokens, dtype=torch.bool)

    def step() -> Tensor:
        model.zero_grad()
        with torch.no_grad():
            normed = functional.rms_norm(last_hidden, (case.hidden,), inputs.norm, config.rms_norm_eps)
        losses, *_ = model(
            input_ids=shifted[0],
            attention_mask=attention_mask,
            target=None,
            loss_mask=shifted[1].unsqueeze(-1),
            hidden_states=inputs.taps,
            target_hidden_for_compact=normed,
            target_head_weight=inputs.lm_head,
        )
        loss = sum(DECAY**k * each for k, each in enumerate(losses))
        loss.backward()
        return loss.detach()

    return step


if __name__ == "__main__":
    serve(make_step, ("specforge", "transformers"))
