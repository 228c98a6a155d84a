"""Decode with compiled layers for test_compiled.py, in a process without the shape checks that hinder the compiler.

python tests/support/compiled_steps.py BACKEND
"""

import json
import sys
from functools import partial

import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.kinds.checkpoint import new_head
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema_heads import Eagle3Section

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=10,  # more than the compiler's default limit of recompilations of one function
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
)
PROMPT = [5, 6, 7]


def main(backend: str) -> None:
    """Print as JSON: plain and compiled texts, graphs compiled after the first and last text, layers left patched."""
    torch.manual_seed(0)
    target = TargetModel(LlamaForCausalLM(CONFIG), (2, 5, 7))
    head = new_head(Eagle3Section(kind="eagle3"), target.frozen, DraftVocab.full(97), seed=1).eval()
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    drafter = head_drafter(head, Dynamic(3, 3, 8))
    samplings = [Sampling(), Sampling(1.0, seed=3)]
    plain = [generate(target, PROMPT, 24, sampling).tokens for sampling in samplings]
    torch.compile = partial(torch.compile, backend=backend)
    target.compiles = True
    generate(target, PROMPT, 4, samplings[0], drafter, static=True)
    graphs = counters["stats"]["unique_graphs"]
    compiled = [generate(target, [*PROMPT], 24, sampling, drafter, static=True).tokens for sampling in samplings]
    longer = generate(target, [*range(30)], 24, samplings[0], drafter, static=True).tokens
    left = ["forward" for layer in [*target.layers, *head.decoder_layers] if "forward" in vars(layer)]
    result = {
        "plain": [*plain, generate(target, [*range(30)], 24).tokens],
        "compiled": [*compiled, longer],
        "graphs": [graphs, counters["stats"]["unique_graphs"]],
        "left": left,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
