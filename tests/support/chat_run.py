"""A run of a chat model that is small enough for tests: it writes lower-case letters, one token each."""

from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_run import CHAT_TEMPLATE, END_OF_TEXT, TEXTS, recipe_values, write_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = [*"abcdefghijklmnopqrstuvwxyz[]", "\u0120"]  # the last is how byte-level tokenizers write a space


def build_letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each letter, so that any tokens are those of their text; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(LETTERS) + 1, special_tokens=[END_OF_TEXT], initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE)


def build_chat_target(folder: Path) -> Path:
    tokenizer = build_letters()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,  # it ends a text after 15 tokens on average
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_chat_run(folder: Path, **data: Any) -> Path:
    """Write a recipe whose target writes its own prompts, and that target; `data` overrides fields of its section."""
    build_chat_target(folder / "target")
    write_prompts(folder / "heldout.jsonl", count=len(TEXTS), first=0)
    values = recipe_values(folder)
    own = {"prompts": "self", "heldout_prompts": "self", "num_prompts": 8, "heldout_samples": 3}
    lengths = {"self_prompt_tokens": 40, "prompt_tokens": 100, "response_tokens": 24}
    values["data"] |= own | lengths | data
    values["head"]["draft_vocab_size"] = 20
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
