"""Write the logits that speculators' own dflash or dspark model computes; needs a Python that has speculators.

python tests/interop/block_logits_of_speculators.py EXPORT INPUTS OUT

INPUTS is a safetensors file with taps, tokens, documents and anchors of one row; OUT gets the logits of every block.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core

if __name__ == "__main__":
    folder, inputs, out = sys.argv[1:]
    given = load_file(inputs)
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    anchors, tokens = given["anchors"], given["tokens"]
    core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    with torch.no_grad():
        taps, last, *places = (given[name] for name in ("taps", "last_hidden", "documents", "positions"))
        mask = torch.ones(tokens.shape)
        hidden, logits, *_ = model._backbone_forward(taps, tokens, mask, last, *places, max_anchors=len(anchors))
        size = model.block_size
        logits, hidden = (each.view(len(anchors), size, -1) for each in (logits, hidden))
        if getattr(model, "markov_head", None) is not None:
            block = tokens[0, anchors.unsqueeze(1) + torch.arange(size)]
            before = block if config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], dim=1)
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    save_file({"logits": logits[:, 0 if config.sample_from_anchor else 1 :].contiguous()}, out)
