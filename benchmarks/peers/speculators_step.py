"""speculators' EAGLE-3 training step, with its own model, loss and packing of a batch into one row."""

from typing import Any

import torch
from peers.contender import Case, Inputs, Step, serve
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

DECAY = 0.8


def make_step(case: Case, inputs: Inputs) -> Step:
    on_cpu = case.device == "cpu"  # where FlexAttention has no gradient and Triton does not run
    sizes: dict[str, Any] = {
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "vocab_size": case.vocab,
        "max_position_embeddings": case.seq + case.unroll,
        "attn_implementation": "sdpa" if on_cpu else "simple_flex_attention",
    }
    layer = LlamaConfig(**sizes)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=case.draft_vocab,
        eagle_aux_hidden_state_layer_ids=[2, case.num_layers // 2, case.num_layers - 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.unroll)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config)
    set_frozen_weights(model, case, inputs)
    # Index t of a document holds the features of token t, and token t + 1 with its target. Documents lie end to end.
    length = case.seq - 1
    document_ids = torch.arange(case.batch, device=case.device).repeat_interleave(length).unsqueeze(0)
    positions = torch.arange(1, case.seq, device=case.device).repeat(case.batch).unsqueeze(0)
    loss_config = resolve_loss_config("kl_div", "eager" if on_cpu else "fused")

    def step() -> Tensor:
        model.zero_grad()
        _, loss, _ = model(
            hidden_states=packed(inputs.taps[:, :-1]),
            input_ids=packed(inputs.tokens[:, 1:]),
            document_ids=document_ids,
            loss_mask=packed(inputs.loss_mask[:, 1:]),
            position_ids=positions,
            verifier_last_hidden_states=packed(inputs.last_hidden[:, 1:]),
            ttt_steps=case.unroll,
            ttt_step_loss_decay=DECAY,
            loss_config=loss_config,
        )
        loss.backward()
        return loss.detach()

    return step


def set_frozen_weights(model: Any, case: Case, inputs: Inputs) -> None:
    """Give a model of any kind the target's embedding, norm and lm_head."""
    if case.draft_vocab < case.vocab:
        inside = torch.arange(case.vocab) < case.draft_vocab
        model.load_vocab_mappings(inside, torch.zeros(case.draft_vocab, dtype=torch.long))
    model.to(case.device, case.torch_dtype)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(inputs.embedding)
        model.verifier_norm.weight.copy_(inputs.norm)
        for lm_head in (model.lm_head, model.verifier_lm_head):
            lm_head.weight.copy_(inputs.lm_head[: case.draft_vocab])


def packed(each: Tensor) -> Tensor:
    """The documents of a batch in one row, end to end."""
    return each.flatten(0, 1).unsqueeze(0)


if __name__ == "__main__":
    serve(make_step, ("speculators", "transformers"))
