"""speculators' DFlash training step, with its own model, loss and packing of a batch into one row."""

from typing import Any

import torch
from peers.contender import Case, Inputs, Step, serve
from peers.speculators_step import packed, set_frozen_weights
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config


def make_step(case: Case, inputs: Inputs) -> Step:
    on_cpu = case.device == "cpu"  # where FlexAttention has no gradient and Triton does not run
    sizes: dict[str, Any] = {
        "hidden_size": case.hidden,
        "intermediate_size": case.mlp,
        "num_hidden_layers": case.head_layers,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": case.hidden // case.num_heads,
        "vocab_size": case.vocab,
        "max_position_embeddings": case.seq + case.block_size,
        "attn_implementation": "sdpa" if on_cpu else "simple_flex_attention",
    }
    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**sizes),
        draft_vocab_size=case.draft_vocab,
        block_size=case.block_size,
        aux_hidden_state_layer_ids=[*case.taps],
        mask_token_id=case.vocab - 1,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = DFlashDraftModel(config)
    set_frozen_weights(model, case, inputs)
    # Index t holds the features of token t and the token itself; the library looks one back for a slot's target.
    loss_config = resolve_loss_config("ce" if case.to_text else "kl_div", "eager" if on_cpu else "fused")
    document_ids = torch.arange(case.batch, device=case.device).repeat_interleave(case.seq).unsqueeze(0)
    positions = torch.arange(case.seq, device=case.device).repeat(case.batch).unsqueeze(0)

    def step() -> Tensor:
        model.zero_grad()
        _, loss, _ = model(
            hidden_states=packed(inputs.taps),
            input_ids=packed(inputs.tokens),
            loss_mask=packed(inputs.loss_mask),
            verifier_last_hidden_states=packed(inputs.last_hidden),
            document_ids=document_ids,
            position_ids=positions,
            max_anchors=case.anchors * case.batch,
            loss_config=loss_config,
            per_position_loss_weight="fixed-exp-decay",
        )
        loss.backward()
        return loss.detach()

    return step


if __name__ == "__main__":
    serve(make_step, ("speculators", "transformers"))
