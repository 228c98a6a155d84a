"""Our EAGLE-3 training step, as trainers/step.py runs it."""

import torch
from peers.contender import Case, Inputs, Step, serve
from torch import Tensor

from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.kinds.eagle3 import Eagle3Head
from headstart.heads.target_config import TargetConfig
from headstart.heads.vocab import DraftVocab
from headstart.recipes.schema_heads import Eagle3Section
from headstart.recipes.schema_train import TrainSection
from headstart.trainers.objectives.objective import Objective
from headstart.trainers.objectives.unrolled import Teacher, UnrolledHead
from headstart.trainers.parallel.head_on_ranks import build_optimizers


def make_step(case: Case, inputs: Inputs) -> Step:
    frozen, vocab = frozen_of(case, inputs), DraftVocab(torch.arange(case.draft_vocab), case.vocab)
    head = new_head(Eagle3Section(kind="eagle3", norms=case.norms), frozen, vocab, seed=0).to(
        case.device, case.torch_dtype
    )
    assert isinstance(head, Eagle3Head)
    objective = Objective(unroll_weights=tuple(0.8**k for k in range(case.unroll)))
    teacher = Teacher(frozen, vocab)
    unrolled = UnrolledHead(head, teacher, objective)
    batch = batch_of(case, inputs)
    optimizers = []
    if case.optimizer is not None:
        section = TrainSection.model_validate({"steps": 1, "optimizer": case.optimizer})
        optimizers = build_optimizers(head, section)

    def step() -> Tensor:
        unrolled.zero_grad()
        supervision = teacher.supervise(batch)
        scores = unrolled(batch, supervision, supervision.counts(case.unroll))
        scores.loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return scores.loss.detach()

    return step


def frozen_of(case: Case, inputs: Inputs) -> FrozenTarget:
    config = TargetConfig.from_dict(
        {
            "model_type": "llama",
            "hidden_size": case.hidden,
            "intermediate_size": case.mlp,
            "num_hidden_layers": case.num_layers,
            "num_attention_heads": case.num_heads,
            "num_key_value_heads": case.num_kv_heads,
            "vocab_size": case.vocab,
            "max_position_embeddings": case.seq,
        }
    )
    embedding, norm, lm_head = (each.to(case.device) for each in (inputs.embedding, inputs.norm, inputs.lm_head))
    return FrozenTarget(config, embedding, norm, None, lm_head)


def batch_of(case: Case, inputs: Inputs) -> TrainingBatch:
    rows = zip(inputs.tokens, inputs.loss_mask, inputs.taps, inputs.last_hidden, strict=True)
    return TrainingBatch.collate([Sample(*row) for row in rows], case.torch_dtype, case.device)


if __name__ == "__main__":
    serve(make_step, ())
