"""Speculative decoding with an EAGLE-3 head in one file, with torch and transformers alone.

    python examples/one_file.py --target assets/demo_target --head assets/demo_head --prompt "def main("

Without --prompt it is a chat, by default with models/SmolLM2-135M-Instruct. The text is the target's own greedy text.
Each step starts from a root: the newest token, which the target has not read yet.

    catch up  the head reads the hidden states that the target computed for the accepted nodes
    draft     the head proposes a tree of tokens after the root           root - the - cat - sat
    verify    the target reads root and tree in one pass; a mask lets         \\- a  - dog
              each node see only itself and its ancestors
    accept    from the root, follow the target's own choices while they are children in the tree;
              the first choice that is not in the tree is the bonus token, the root of the next step
    compact   keep the keys and values of the accepted nodes, drop the others

The head is a folder with config.json and model.safetensors of EAGLE-3 (arXiv 2503.01840) or EAGLE-3.1 (2605.09992).
This file decodes one text at a time, greedily, on targets with full attention in every layer.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, PreTrainedModel, TextStreamer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


class Attention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, config: Any) -> None:  # a LlamaConfig
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: DynamicCache) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        keys, values = cache.update(key, value, 0)  # [1, kv_heads, cached + seq, head_dim]
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The head's one decoder layer. Its attention reads the token's embedding and the feature side by side."""

    def __init__(self, config: Any) -> None:  # a LlamaConfig
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        self.norm_before_residual = getattr(config, "norm_before_residual", False)

    def forward(
        self, embedding: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        normed = self.hidden_norm(feature)
        inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self.norm_before_residual else feature
        hidden = residual + self.self_attn(inputs, rotary, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """An EAGLE-3 head. Its parameters have the names of the file, so `load_state_dict` checks that all are used."""

    target_ids: Tensor  # of each token that the head scores, the target's token. [draft_vocab]

    def __init__(self, config: Any, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        hidden, target_hidden, num_layers = config.hidden_size, model.config.hidden_size, model.config.num_hidden_layers
        # The taps: which of the target's hidden_states the head reads, as transformers counts them.
        taps = getattr(config, "headstart", {}).get("taps") or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        self.taps = taps or [2, num_layers // 2, num_layers - 3]
        self.fc = nn.Linear(len(self.taps) * target_hidden, hidden, bias=False)
        if getattr(config, "fc_norm", False):  # EAGLE-3.1: a norm for each tap
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_hidden, config.rms_norm_eps) for _ in self.taps)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.norm_output = getattr(config, "norm_output", False)  # EAGLE-3.1: feed back the normed hidden state
        self.lm_head = nn.Linear(hidden, len(tensors["lm_head.weight"]), bias=False)
        if "embed_tokens.weight" in tensors:
            self.embed_tokens = nn.Embedding(*tensors["embed_tokens.weight"].shape)
        self.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
        # The head may score a part of the vocabulary: its token i is the target's token i + d2t[i].
        offsets = tensors.get("d2t", torch.zeros(len(self.lm_head.weight), dtype=torch.long))
        self.register_buffer("target_ids", torch.arange(len(offsets)) + offsets, persistent=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.to(model.device, model.dtype)
        # The tuple keeps the target's embedding out of this module's parameters.
        self.embedding = (getattr(self, "embed_tokens", model.get_input_embeddings()),)

    @classmethod
    def load(cls, folder: str | Path, model: PreTrainedModel) -> "DraftHead":
        config = LlamaConfig.from_pretrained(folder)
        return cls(config, model, load_file(Path(folder) / "model.safetensors")).eval()

    def project(self, taps: list[Tensor]) -> Tensor:
        """The feature of each position, from the target's hidden states there. [1, seq, hidden]"""
        if hasattr(self, "fc_norm"):
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        return self.fc(torch.cat(taps, dim=-1))

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Entry t reads the feature of position t and the token of position t + 1; it predicts token t + 2."""
        return self.midlayer(self.embedding[0](tokens), features, self.rotary(features, positions), mask, cache)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.lm_head(self.norm(hidden)).float(), dim=-1)

    def feedback(self, hidden: Tensor) -> Tensor:
        """The head's own output as the feature of a position that the target has not read yet."""
        return self.norm(hidden) if self.norm_output else hidden


@dataclass
class Tree:
    """Draft tokens after a root. Node 0 is the root, and parents come before their children."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    def mask(self, device: torch.device) -> Tensor:
        """mask[i, j]: does node i see node j? It sees itself and its ancestors. [nodes, nodes]"""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask.to(device)

    def accept(self, choices: list[int]) -> list[int]:
        """The path of nodes that the target would have written, given its choice after each node."""
        children = {(self.parents[node], self.tokens[node]): node for node in range(1, len(self.tokens))}
        path = [0]
        while (child := children.get((path[-1], choices[path[-1]]))) is not None:
            path.append(child)
        return path


def draft(
    head: DraftHead, root: int, hidden: Tensor, cache: DynamicCache, verified: Tensor, width: int, depth: int
) -> Tree:
    """A tree whose levels hold the `width` nodes with the likeliest paths, by the head's own estimate.

    `hidden` is what the head computed at the last verified position [1, 1, hidden], `verified` ones for its keys.
    """
    tree, frontier = Tree([root], [-1], [0]), [0]  # the frontier: the nodes of the newest level
    totals = torch.zeros(1, device=hidden.device)  # log-probabilities of the paths to the frontier
    visible = verified  # the head's keys that the nodes of the frontier see. [frontier, keys]
    for level in range(depth):
        scores, columns = head.log_probabilities(hidden[0]).topk(width)  # [frontier, width]
        totals, best = (totals[:, None] + scores).flatten().topk(width)
        tokens, rows = head.target_ids[columns.flatten()[best]], best // width  # a row: the parent's, in the frontier
        first = len(tree.tokens)
        tree.tokens += tokens.tolist()
        tree.parents += [frontier[row] for row in rows.tolist()]
        tree.depths += [level + 1] * width
        frontier = list(range(first, first + width))
        if level + 1 < depth:
            visible = torch.cat([visible[rows], torch.eye(width, dtype=torch.bool, device=hidden.device)], dim=1)
            positions = torch.full((1, width), verified.shape[1] + level, device=hidden.device)
            features = head.feedback(hidden)[:, rows]  # the parents' outputs
            hidden = head(features, tokens[None], positions, visible[None, None], cache)
    cache.crop(-(depth - 1) * width)  # what the head read of draft tokens will be replaced by the target's features
    return tree


@torch.inference_mode()
def decode(
    model: PreTrainedModel, head: DraftHead, input_ids: Tensor, width: int = 4, depth: int = 5
) -> Iterator[list[int]]:
    """Yield the tokens that each pass of the target adds to the text, 1 to depth + 1 of them. It never ends."""
    device, cache, head_cache = input_ids.device, DynamicCache(), DynamicCache()
    output = model(input_ids=input_ids, past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
    taps = [output.hidden_states[tap] for tap in head.taps]  # each [1, seq, hidden]
    root = int(output.logits[0, -1].argmax())
    next_tokens = torch.cat([input_ids, input_ids.new_tensor([[root]])], dim=1)[:, 1:]
    yield [root]
    while True:
        # Catch up: the head reads the newly verified positions, each with the token after it.
        old, length = head_cache.get_seq_length(), cache.get_seq_length()
        ones = torch.ones(length, length, dtype=torch.bool, device=device)
        positions = torch.arange(old, length, device=device)[None]
        hidden = head(head.project(taps), next_tokens, positions, ones.tril()[None, None, old:], head_cache)
        tree = draft(head, root, hidden[:, -1:], head_cache, ones[:1], width, depth)

        # Verify: the target reads all nodes in one pass, at the positions of their depths.
        ancestors = tree.mask(device)
        visible = torch.cat([ancestors.new_ones(len(ancestors), length), ancestors], dim=1)
        mask = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
        output = model(
            input_ids=torch.tensor([tree.tokens], device=device),
            attention_mask=mask[None, None],
            position_ids=length + torch.tensor([tree.depths], device=device),
            past_key_values=cache,
            output_hidden_states=True,
        )

        # Accept: the target's choices decide, so the text is its own.
        choices = output.logits[0].argmax(dim=-1).tolist()
        path = tree.accept(choices)
        root = choices[path[-1]]  # the bonus token
        written = [*(tree.tokens[node] for node in path[1:]), root]
        taps, next_tokens = [output.hidden_states[tap][:, path] for tap in head.taps], input_ids.new_tensor([written])

        # Compact: the cache keeps the text before the step and the accepted nodes.
        slots = torch.tensor([*range(length), *(length + node for node in path)], device=device)
        layers: Any = cache.layers
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
        yield written


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    inputs: Tensor | None = None,
    head: DraftHead | str | Path = ".",
    max_new_tokens: int = 256,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The prompt and the target's greedy continuation [1, seq], as `model.generate` returns them.

    The signature is that of a custom `generate` of transformers. Raises ValueError for arguments it does not support.
    """
    prompt = inputs if input_ids is None else input_ids
    unsupported = [name for name, value in kwargs.items() if value not in (None, False) and name != "use_cache"]
    if prompt is None or len(prompt) != 1 or unsupported or (attention_mask is not None and not attention_mask.all()):
        raise ValueError(
            f"needs one prompt without padding, and decodes greedily; unsupported: {unsupported or 'rows'}"
        )
    head = head if isinstance(head, DraftHead) else DraftHead.load(head, model)
    ends = torch.tensor(model.generation_config.eos_token_id).flatten().tolist()
    written: list[int] = []
    for tokens in decode(model, head, prompt):
        tokens = tokens[: max_new_tokens - len(written)]
        tokens = tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]
        written += tokens
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
        if written[-1] in ends or len(written) == max_new_tokens:
            break
    if streamer is not None:
        streamer.end()
    return torch.cat([prompt, prompt.new_tensor([written])], dim=1)


class CountingStreamer(TextStreamer):
    """Prints the text as it comes, and counts the target's passes."""

    passes = 0

    def put(self, value: Tensor) -> None:
        self.passes += 1
        super().put(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct", help="folder or hub name of the target")
    parser.add_argument("--head", default="assets/smollm2_head", help="folder of the head")
    parser.add_argument("--prompt", help="answer this and exit; without it, chat until an empty line")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    head = DraftHead.load(args.head, model)
    messages: list[dict[str, str]] = []
    while prompt := args.prompt or input("> "):
        messages.append({"role": "user", "content": prompt})
        if tokenizer.chat_template:
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        else:
            encoded = tokenizer(prompt, return_tensors="pt")
        streamer = CountingStreamer(tokenizer, skip_special_tokens=True)
        prompt_ids = encoded["input_ids"]
        text = generate(model, prompt_ids, head=head, max_new_tokens=args.max_new_tokens, streamer=streamer)
        answer = text[0, prompt_ids.shape[1] :]
        print(f"[{len(answer)} tokens in {streamer.passes} passes of the target]")
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        if args.prompt:
            break


if __name__ == "__main__":
    main()
