"""A run small enough for tests: a random Llama with 4 layers, a tokenizer, prompts and a recipe."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.data_pipelines.features.batches import Sample
from headstart.data_pipelines.features.shard_files import ShardFile, stored_states, stored_tokens
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, new_head, save_head
from headstart.recipes import Recipe, load_recipe

VOCAB_SIZE = 300
END_OF_TEXT = "<end>"
ENDS = [0, *range(150, 165)]  # several end tokens, so that the responses of a random target differ in length
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
LETTERS = [*"abcdefghijklmnopqrstuvwxyz[]", "\u0120"]  # the last is how byte-level tokenizers write a space
TEXTS = [
    "the target writes, the head guesses, the target judges",
    "a draft is a tree of tokens and a path of it is kept",
    "harvest once, then train as many heads as you like",
    "whatever is killed resumes, and ends in the same weights",
    "for token in tokens: yield token  # one at a time",
    "noise of the position, not of the drafter, picks the token",
    "def head(features, tokens, positions, mask, cache): ...",
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": [END_OF_TEXT], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, **options))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    named: Any = {"eos_token": END_OF_TEXT, "chat_template": CHAT_TEMPLATE, "model_max_length": 128}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def build_target(
    folder: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE, num_layers: int = 4, tokenizer: Any = None, **fields: Any
) -> Path:
    """Save a random target with weights so large that next tokens depend on the text and near-ties are rare."""
    sizes = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": ENDS, "tie_word_embeddings": False,
    }  # fmt: skip
    config = LlamaConfig(**sizes | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    (tokenizer or build_tokenizer()).save_pretrained(folder)
    return folder


def write_config(target: Path, **sizes: int) -> None:
    """Give a target's config.json other sizes; its weights no longer fit."""
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))


def write_prompts(path: Path, count: int, first: int) -> Path:
    """Write prompts of different lengths, some of them conversations."""
    rows: list[dict[str, Any]] = []
    for number in range(first, first + count):
        text = f"{number} {TEXTS[number % len(TEXTS)][: 6 + 5 * (number % 5)]}"
        conversation = number % 4 == 3
        rows.append({"messages": [{"role": "user", "content": text}]} if conversation else {"prompt": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# It runs the whole pipeline in about a second, with several shards and a draft vocabulary.
RECIPE = """
run_dir: FOLDER/run
seed: 3
target: {path: FOLDER/target, dtype: float32, device: cpu}
data:
  {prompts: FOLDER/prompts.jsonl, heldout_prompts: FOLDER/heldout.jsonl, num_prompts: 12, prompt_tokens: 24,
  response_tokens: 12, temperatures: [0.0, 0.8], generate_batch: 5, harvest_batch: 2, heldout_samples: 4,
  shard_samples: 5, dtype: float32}
head: {kind: eagle3, draft_vocab_size: 80}
train:
  {steps: 8, batch_size: 3, learning_rate: 0.001, warmup_steps: 2, unroll: 3, checkpoint_every: 4, eval_prompts: 0}
decode: {depth: 2, width: 2, nodes: 4, max_new_tokens: 8}
"""


def recipe_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(RECIPE.replace("FOLDER", str(folder)))
    return values


def build_run(folder: Path) -> Path:
    """Write everything that a run needs into a folder, without running it; returns the recipe's path."""
    build_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", count=14, first=0)
    write_prompts(folder / "heldout.jsonl", count=5, first=100)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_values(folder), sort_keys=False))
    return path


def copy_run(folder: Path, to: Path) -> Path:
    """Copy a folder with a run, its target and its recipe, in which paths then name the new folder; returns that."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    recipe = to / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(folder), str(to)))
    return to


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


def build_chat_run(folder: Path, **data: Any) -> Path:
    """Write a recipe whose target writes its own prompts in lower-case letters, and that target."""
    letters = build_letters()
    ends: dict[str, Any] = {"eos_token_id": 0, "initializer_range": 0.1}  # it ends a text after 15 tokens on average
    build_target(folder / "target", vocab_size=len(letters), tokenizer=letters, max_position_embeddings=256, **ends)
    write_prompts(folder / "heldout.jsonl", count=len(TEXTS), first=0)
    values = recipe_values(folder)
    own = {"prompts": "self", "heldout_prompts": "self", "num_prompts": 8, "heldout_samples": 3}
    lengths = {"self_prompt_tokens": 40, "prompt_tokens": 100, "response_tokens": 24}
    values["data"] |= own | lengths | data
    values["head"]["draft_vocab_size"] = 20
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def tiny_recipe(folder: Path, *overrides: str) -> Recipe:
    """Load the recipe of a folder made by `build_run`, for a run in this process."""
    PartialState(cpu=True)  # the first PartialState of a process decides the device
    return load_recipe(folder / "recipe.yaml", overrides)


def make_dense(head: nn.Module, amount: float = 0.2) -> None:
    """Change every weight by noise, so that no zero weight hides a path through the head."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)


def recipe_with_random_head(folder: Path) -> Recipe:
    """The recipe of a new folder, whose run has a head that nothing has trained."""
    build_run(folder)
    recipe = tiny_recipe(folder)
    frozen = FrozenTarget.from_folder(Path(recipe.target.path), torch.float32)
    vocab = draft_vocab(recipe.head, torch.arange(frozen.config.vocab_size))
    save_head(new_head(recipe.head, frozen, vocab, 0), recipe.head_dir)
    return recipe


def write_shard(path: Path, samples: list[Sample], taps: tuple[int, ...], made_from: str, storage: str) -> None:
    file = ShardFile(path, [len(sample.tokens) for sample in samples], made_from)
    for number, sample in enumerate(samples):
        states = stored_states(taps, sample.taps, sample.last_hidden, storage)
        file.put([number], {**stored_tokens(sample.tokens, sample.loss_mask), **states})
    file.finish()


def assert_same_sample(found: Sample, expected: Sample) -> None:
    """Assert the same text and, up to float32 rounding (1e-5 of the largest value), the same states."""
    assert found.tokens.equal(expected.tokens)
    assert found.loss_mask.equal(expected.loss_mask)
    for mine, its in ((found.taps, expected.taps), (found.last_hidden, expected.last_hidden)):
        assert mine.shape == its.shape
        assert float((mine - its).abs().max()) < 1e-5 * float(its.abs().max())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files_of(folder)}


def modified(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files_of(folder)}


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def logged_step(metrics: Path) -> int:
    """The newest step in the log of a run that may be going on; 0 if it has none yet."""
    found = re.findall(r'"step": (\d+)', metrics.read_text()) if metrics.exists() else []
    return int(found[-1]) if found else 0


def quiet_environment(root: Path) -> dict[str, str]:
    """The environment for commands in separate processes: this checkout's packages, one thread, no GPU, no network."""
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, "PYTHONPATH": str(root)}
