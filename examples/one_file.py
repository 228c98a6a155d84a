"""Speculative decoding with an EAGLE-3 head in one file, with torch and transformers alone.

    python examples/one_file.py --target assets/demo_target --head assets/demo_head --prompt "def main("

Exported heads hold a copy of this file, in custom_generate/, where transformers finds it:

    model.generate(**inputs, custom_generate="FOLDER_OF_THE_HEAD", trust_remote_code=True)

In float32 the text is plain generate's, also if it is sampled: each token takes one random number, as it does there.
Each step starts from a root: the newest token, which the target has not read yet.

    catch up  the head reads the hidden states that the target computed for the accepted nodes
    draft     the head proposes a tree of tokens after the root           root - the - cat - sat
    verify    the target reads root and tree in one pass; a mask lets         \\- a  - dog
              each node see only itself and its ancestors
    accept    from the root, follow the target's own choices while they are children in the tree;
              the first choice that is not in the tree is the bonus token, the root of the next step
    compact   keep the keys and values of the accepted nodes, drop the others

The head is a folder with config.json and model.safetensors of EAGLE-3 (arXiv 2503.01840) or EAGLE-3.1 (2605.09992).
This file decodes one text at a time, on targets whose layers have full attention or a sliding window.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, PreTrainedModel, TextStreamer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import cached_file


class Layer(LlamaDecoderLayer):
    """The head's one decoder layer. Its attention reads the token's embedding and the feature side by side."""

    def __init__(self, config: Any) -> None:  # a LlamaConfig
        super().__init__(config, layer_idx=0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = nn.Linear(2 * config.hidden_size, getattr(self.self_attn, name).out_features, bias=False)
            setattr(self.self_attn, name, wide)
        self.norm_before_residual = getattr(config, "norm_before_residual", False)

    def forward(  # type: ignore[override]
        self, embedding: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        normed = self.hidden_norm(feature)
        inputs = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self.norm_before_residual else feature
        hidden = residual + self.self_attn(inputs, rotary, mask, cache)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """An EAGLE-3 head. Its parameters have the names of the file, so `load_state_dict` checks that all are used."""

    target_ids: Tensor  # of each token that the head scores, the target's token. [draft_vocab]

    def __init__(self, config: Any, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        target = model.config.get_text_config()
        hidden, target_hidden, num_layers = config.hidden_size, target.hidden_size, target.num_hidden_layers
        if (trained_for := getattr(config, "target_hidden_size", target_hidden)) != target_hidden:
            raise ValueError(f"the head is for a target of hidden size {trained_for}; this one has {target_hidden}")
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
        # The tuple keeps both out of this module, whose parts get the target's number format.
        self.outside = getattr(self, "embed_tokens", model.get_input_embeddings()), LlamaRotaryEmbedding(config)

    @classmethod
    def load(cls, folder: str | Path, model: PreTrainedModel) -> "DraftHead":
        """The head in a folder or hub repository, which is read once for each model."""
        if LOADED.get(model, ("",))[0] != str(folder):
            config = LlamaConfig.from_pretrained(folder, attn_implementation="sdpa")
            tensors = load_file(str(cached_file(folder, "model.safetensors")))
            with torch.random.fork_rng(devices=[]):  # its first weights draw no numbers that are the text's
                LOADED[model] = str(folder), cls(config, model, tensors).requires_grad_(False)
        return LOADED[model][1].to(model.device, model.dtype)

    def project(self, taps: list[Tensor]) -> Tensor:
        """The feature of each position, from the target's hidden states there. [1, seq, hidden]"""
        if hasattr(self, "fc_norm"):
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        return self.fc(torch.cat(taps, dim=-1))

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Entry t reads the feature of position t and the token of position t + 1; it predicts token t + 2."""
        embedding, rotary = self.outside
        return self.midlayer(embedding(tokens), features, rotary(features, positions), mask, cache)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(self.lm_head(self.norm(hidden)).float(), dim=-1)


LOADED = WeakKeyDictionary[PreTrainedModel, tuple[str, DraftHead]]()


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

    def accept(self, choose: Callable[[int], int | None]) -> list[int]:
        """The path of nodes that the target writes, given its choice after a node; None ends the path."""
        children = {(self.parents[node], self.tokens[node]): node for node in range(1, len(self.tokens))}
        path = [0]
        while (child := children.get((path[-1], choose(path[-1])))) is not None:  # type: ignore[arg-type]
            path.append(child)
        return path


def draft(
    head: DraftHead, root: int, hidden: Tensor, cache: DynamicCache, verified: Tensor, width: int, depth: int
) -> Tree:
    """A tree whose levels hold the `width` nodes with the likeliest paths, by the head's own estimate.

    `hidden` is what the head computed at the last verified position [1, 1, hidden], `verified` ones for its keys.
    """
    tree, frontier = Tree([root], [-1], [0]), range(1)  # the frontier: the nodes of the newest level
    totals = torch.zeros(1, device=hidden.device)  # log-probabilities of the paths to the frontier
    visible = verified  # the head's keys that the nodes of the frontier see. [frontier, keys]
    for level in range(depth):
        scores, columns = head.log_probabilities(hidden[0]).topk(width)  # [frontier, width]
        totals, best = (totals[:, None] + scores).flatten().topk(width)
        tokens, rows = head.target_ids[columns.flatten()[best]], best // width  # a row: the parent's, in the frontier
        tree.tokens += tokens.tolist()
        tree.parents += [frontier[row] for row in rows.tolist()]
        tree.depths += [level + 1] * width
        frontier = range(len(tree.tokens) - width, len(tree.tokens))
        if level + 1 < depth:
            visible = torch.cat([visible[rows], torch.eye(width, dtype=torch.bool, device=hidden.device)], dim=1)
            positions = torch.full((1, width), verified.shape[1] + level, device=hidden.device)
            features = head.norm(hidden) if head.norm_output else hidden  # the head's own output, of the parents
            hidden = head(features[:, rows], tokens[None], positions, visible[None, None], cache)
    cache.crop(-(depth - 1) * width)  # what the head read of draft tokens will be replaced by the target's features
    return tree


def mask_for(model: PreTrainedModel, visible: Tensor, positions: Tensor) -> Any:
    """The additive mask of nodes that see these keys; if the target has several kinds of layers, one for each."""
    config, masks, dtype = model.config.get_text_config(), dict[str, Tensor](), model.dtype
    window: float = getattr(config, "sliding_window", None) or torch.inf
    for kind in {*(getattr(config, "layer_types", None) or ["sliding_attention"])}:
        near = positions > positions[-len(visible) :, None] - (window if kind == "sliding_attention" else torch.inf)
        hidden = ~(visible & near)[None, None]
        masks[kind] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    return masks if len(masks) > 1 else masks.popitem()[1]


@dataclass
class Text:
    """A text that the target writes, by the rules that transformers prepared for it."""

    tokens: Tensor  # with the prompt. [1, seq]
    process: Callable[[Tensor, Tensor], Tensor]  # scores, given tokens and logits [1, vocab]
    is_complete: Callable[[Tensor, Any], Tensor]  # [1]
    is_sampled: bool
    streamer: Any = None
    has_ended: bool = False

    def add(self, logits: Tensor) -> int | None:
        """Write the target's next token, given its logits [vocab]. It is returned unless it ends the text."""
        scores = self.process(self.tokens, logits[None].float())
        token = scores.softmax(-1).multinomial(1) if self.is_sampled else scores.argmax(-1, keepdim=True)
        self.tokens = torch.cat([self.tokens, token], dim=1)
        if self.streamer is not None:
            self.streamer.put(token[0].cpu())
        self.has_ended = bool(self.is_complete(self.tokens, None).all())
        return None if self.has_ended else int(token)


def decode(model: PreTrainedModel, text: Text, head: DraftHead, width: int, depth: int) -> Iterator[int]:
    """Write the text to its end; yield its length after each pass of the target, which adds 1 to depth + 1 tokens."""
    device, cache, head_cache = text.tokens.device, DynamicCache(), DynamicCache()
    output = model(input_ids=text.tokens, past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
    taps = [output.hidden_states[tap] for tap in head.taps]  # each [1, seq, hidden]
    text.add(output.logits[0, -1])
    yield text.tokens.shape[1]
    while not text.has_ended:
        # Catch up: the head reads the newly verified positions, each with the token after it.
        old, length = head_cache.get_seq_length(), cache.get_seq_length()
        positions = torch.arange(length, device=device)
        seen = positions <= positions[old:, None]
        read, at = text.tokens[:, old + 1 :], positions[None, old:]
        hidden = head(head.project(taps), read, at, seen[None, None], head_cache)
        tree = draft(head, int(text.tokens[0, -1]), hidden[:, -1:], head_cache, seen[-1:], width, depth)

        # Verify: the target reads all nodes in one pass, at the positions of their depths.
        ancestors = tree.mask(device)
        visible = torch.cat([ancestors.new_ones(len(ancestors), length), ancestors], dim=1)
        nodes = length + torch.tensor(tree.depths, device=device)
        output = model(
            input_ids=torch.tensor([tree.tokens], device=device),
            attention_mask=mask_for(model, visible, torch.cat([positions, nodes])),
            position_ids=nodes[None],
            past_key_values=cache,
            output_hidden_states=True,
        )

        # Accept: the target's choices decide, so the text is its own.
        path = tree.accept(lambda node, logits=output.logits[0]: text.add(logits[node]))  # type: ignore[misc]
        taps = [output.hidden_states[tap][:, path] for tap in head.taps]

        # Compact: the cache keeps the text before the step and the accepted nodes.
        end, slots = length + len(path), length + torch.tensor(path, device=device)
        for layer in list[Any](cache.layers):
            for name in ("keys", "values"):
                states = getattr(layer, name)  # [1, kv_heads, length + nodes, head_dim]
                states[:, :, length:end] = states[:, :, slots]
                setattr(layer, name, states[:, :, :end])
        yield text.tokens.shape[1]


def decoding_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafts: tuple[DraftHead, int, int],
    streamer: Any = None,
    **inputs: Any,
) -> Tensor:
    """What transformers calls with the arguments of `generate` that it has checked and prepared."""
    prepared = ("past_key_values", "position_ids", "use_cache", "logits_to_keep", "cache_position")
    inputs["return_dict_in_generate"] = generation_config.return_dict_in_generate or None
    others = [name for name, value in inputs.items() if value is not None and name not in prepared]
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    others += {*layers} - {"full_attention", "sliding_attention"}
    mode = generation_config.get_generation_mode()
    if len(input_ids) != 1 or others or mode not in ("greedy_search", "sample"):
        given = ", ".join([f"{len(input_ids)} texts", mode, *others])
        allowed = "one text without padding, by greedy_search or sample, from layers of full or sliding attention"
        raise ValueError(f"{given} given; {allowed}, is allowed at a time")
    text = Text(input_ids, logits_processor, stopping_criteria, generation_config.do_sample, streamer)
    list(decode(model, text, *drafts))  # to its end
    if streamer is not None:
        streamer.end()
    return text.tokens


def generate(
    model: PreTrainedModel,
    head: str | Path | None = None,
    draft_width: int = 4,
    draft_depth: int = 5,
    streamer: Any = None,
    past_key_values: None = None,
    **arguments: Any,
) -> Tensor:
    """The prompt and the target's continuation [1, seq], as `model.generate` returns them for these arguments.

    Raises ValueError for several texts, and for arguments that change more than the choice of tokens.
    """
    if head is None:  # transformers runs a copy of this file, and does not say which folder it is from
        head = sys._getframe(1).f_locals["custom_generate"]
    if past_key_values is not None:
        raise ValueError("past_key_values given; None is allowed, as the head has to read the whole text")
    drafts = DraftHead.load(head, model), draft_width, draft_depth
    loop = partial(decoding_loop, drafts=drafts, streamer=streamer)
    return model.generate(custom_generate=loop, streamer=streamer, **arguments)  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct", help="folder or hub name of the target")
    parser.add_argument("--head", default="assets/smollm2_head", help="folder or hub name of the head")
    parser.add_argument("--prompt", default="Why is the sky blue?")
    args = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    prompt, said = args.prompt, [{"role": "user", "content": args.prompt}]
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    options = {"max_new_tokens": 128, "do_sample": False, **tokenizer(prompt, return_tensors="pt")}
    started = time.perf_counter()
    text = generate(model, args.head, streamer=TextStreamer(tokenizer), **options)
    drafted = time.perf_counter()
    same, seconds = text.equal(model.generate(**options)), time.perf_counter() - drafted
    print(f"[{drafted - started:.1f} s; plain generate: {seconds:.1f} s, {'the same' if same else 'another'} text]")


if __name__ == "__main__":
    main()
