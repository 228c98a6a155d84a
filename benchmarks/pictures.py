"""Measure what pictures in the training data are worth: EAGLE-3 with them, without, and on both; DSpark on both.

    python benchmarks/pictures.py target runs/pictures/target
    python benchmarks/pictures.py heads runs/pictures

The target is a Qwen3-VL of 0.9 million weights that answers by its picture: up to three coloured shapes on a grid. Half
of its samples have no picture: shapes told in words, counting, copying. The heads have the same steps, seeds and
numbers of samples, and about the same size; both kinds of prompts are held out. `permuted`: the target reads the
prompt's picture and the head another's states at its places, so a head that does not use the picture loses nothing.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headstart.common.files import read_jsonl, write_jsonl, write_text
from headstart.heads.base import DraftHead
from headstart.heads.kinds.checkpoint import load_head_for, load_taps
from headstart.heads.target_config import TargetConfig
from headstart.inference.calibrate import score_taps
from headstart.inference.core.request import DecodeStats, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Dynamic
from headstart.inference.engine.loop import generate_batch
from headstart.inference.images.kept import KeptPictures
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe, load_recipe
from headstart.trainers.eagle import train
from headstart.trainers.parallel.muon import Muon

COLOURS = {"red": "#e02020", "green": "#20b030", "blue": "#3040f0", "yellow": "#f0e020", "white": "#ffffff"}
SHAPES = ("circle", "square", "cross", "bar", "ring")
ROWS, COLUMNS, CELL = ("top", "bottom"), ("left", "middle", "right"), 16  # pixels; a cell is one token
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
WORDS = ("river", "stone", "cloud", "lamp", "horse", "bread", "window", "paper", "garden", "music", "winter", "coat")
START, END, *VISION = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ANSWER = f"{START}assistant\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 256, "bos_token_id": None}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": CELL // 2,
}
TOWER |= {"out_hidden_size": 96, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
TOWER_STEPS, STEPS, BATCH, POOL = 350, 500, 32, 8000
SAMPLES, HELD_OUT, DEPTH, SEEDS = 600, 64, 4, (0, 1)
HEAD_STEPS, SHARES = 250, {"images": 1.0, "text": 0.0, "both": 0.5}  # of the samples that have a picture
EAGLE: dict[str, Any] = {"kind": "eagle3", "norms": True}
BLOCK: dict[str, Any] = {"kind": "block", "num_layers": 1, "block_size": DEPTH, "markov_rank": 64}
HEADS = [*((kind, EAGLE) for kind in SHARES), ("both", BLOCK)]
Scene = dict[int, tuple[str, str]]  # cell -> colour and shape


def place(cell: int) -> str:
    return f"{ROWS[cell // 3]} {COLUMNS[cell % 3]}"


def paint(scene: Scene) -> Image.Image:
    picture = Image.new("RGB", (3 * CELL, 2 * CELL), "#101010")
    draw = ImageDraw.Draw(picture)
    for cell, (colour, shape) in scene.items():
        x, y, fill = cell % 3 * CELL, cell // 3 * CELL, COLOURS[colour]
        box = (x + 2, y + 2, x + 13, y + 13)
        if shape == "circle":
            draw.ellipse(box, fill)
        elif shape == "square":
            draw.rectangle(box, fill)
        elif shape == "ring":
            draw.ellipse(box, outline=fill, width=3)
        else:
            draw.rectangle((x + 1, y + 6, x + 14, y + 9), fill)
            if shape == "cross":
                draw.rectangle((x + 6, y + 1, x + 9, y + 14), fill)
    return picture


def ask(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A question about a scene, and its answer."""
    things, number = {cell: " ".join(each) for cell, each in scene.items()}, NUMBERS[len(scene)]
    kind, cell = rng.randrange(5), rng.choice([*scene])
    shape = scene[cell][1]
    if kind == 0:
        cell = rng.randrange(6)
        found = f"is a {things[cell]}" if cell in scene else "is nothing, the cell is empty"
        return f"What is in the {place(cell)}?", f"In the {place(cell)} of the picture there {found}."
    if kind == 1:
        cell = next(each for each in scene if scene[each][1] == shape)
        return f"Where is the {shape}?", f"The {things[cell]} is in the {place(cell)} of the picture."
    if kind == 2:
        named = " and a ".join(things.values())
        return "How many shapes are there?", f"There are {number} shapes in the picture, namely a {named}."
    told = ". ".join(f"In the {place(each)} is a {things[each]}" for each in scene)
    return "Describe the picture.", f"The picture shows {number} shapes. {told}."


def count_or_copy(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        words = " ".join(rng.sample(WORDS, rng.randint(4, 8)))
        return f"Repeat these words: {words}.", f"The words are: {words}."
    start = rng.randint(1, 6)
    counted = NUMBERS[start : rng.randint(start + 3, 12) + 1]
    return f"Count from {counted[0]} to {counted[-1]}.", f"I count from {counted[0]}: {', '.join(counted)}."


@dataclass(frozen=True)
class Row:
    turns: list[tuple[str, str]]  # questions and answers
    scene: Scene | None = None  # of the picture before the first question

    def messages(self, path: str = "") -> list[dict[str, Any]]:
        """The turns up to the last question."""
        said: list[dict[str, Any]] = [
            {"role": role, "content": text}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        if self.scene is not None:
            said[0]["content"] = [{"type": "image", "image": path}, {"type": "text", "text": self.turns[0][0]}]
        return said[:-1]


def draw_rows(seed: int, count: int, share: float = 0.5, turns: int = 1) -> list[Row]:
    """Rows, of which this share has a picture."""
    rng, rows = random.Random(seed), list[Row]()
    for number in range(count):
        cells = sorted(rng.sample(range(6), rng.randint(1, 3)))
        scene = {cell: (rng.choice([*COLOURS]), rng.choice(SHAPES)) for cell in cells}
        is_seen = int((number + 1) * share) > int(number * share)
        is_told = not is_seen and rng.random() < 0.5
        asked = [ask(scene, rng) if is_seen or is_told else count_or_copy(rng) for _ in range(turns)]
        if is_told:
            told = "; ".join(f"{' '.join(each)} {place(cell)}" for cell, each in scene.items())
            asked[0] = (f"A picture has {told}. {asked[0][0]}", asked[0][1])
        rows.append(Row(asked, scene if is_seen else None))
    return rows


def build_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for each word of the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, marks = pre_tokenizers.ByteLevel.alphabet(), [START, END, *VISION]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    texts = [f"user\n{question}\nassistant\n{answer}" for row in rows for question, answer in row.turns]
    tokenizer.train_from_iterator(texts, trainer)
    ends = {"eos_token": END, "pad_token": END, "chat_template": CHAT_TEMPLATE, "model_max_length": 256}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(names, VISION, strict=True)
    }
    ends = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config={**TEXT, **ends, "rope_parameters": ROPE}, vision_config=TOWER, **ids)
    model = Qwen3VLForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(weight, 1.7)  # sharper attention learns to copy sooner
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
    return model


class Reader:
    """Rows as inputs of the model, each picture in 6 tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        size = {"shortest_edge": 6 * CELL**2, "longest_edge": 6 * CELL**2}  # pixels of a picture
        self.processor = Qwen2VLImageProcessorPil(patch_size=CELL // 2, merge_size=2, size=size)
        self.tokenizer, self.pixels = tokenizer, dict[int, Tensor]()

    def see(self, row: Row) -> Tensor:
        if id(row) not in self.pixels:
            self.pixels[id(row)] = self.processor(paint(row.scene or {}), return_tensors="pt")["pixel_values"]
        return self.pixels[id(row)]

    def ids(self, row: Row) -> tuple[Tensor, Tensor]:
        """The tokens of a row, and the labels, which are -100 outside answers."""
        text = self.tokenizer.apply_chat_template(row.messages(), tokenize=False, add_generation_prompt=True)
        tokens, labels = list[int](), list[int]()
        for number, part in enumerate(f"{text}{row.turns[-1][1]}{END}".replace(VISION[2], VISION[2] * 6).split(ANSWER)):
            answer, mark, rest = part.partition(END) if number else ("", "", part)
            for words, is_answer in ((answer + mark, True), (rest + ANSWER * (number < len(row.turns)), False)):
                ids = self.tokenizer(words, add_special_tokens=False)["input_ids"]
                tokens, labels = tokens + ids, labels + (ids if is_answer else [-100] * len(ids))
        return torch.tensor(tokens), torch.tensor(labels)

    def batch(self, rows: list[Row]) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs and the labels."""
        texts, wanted = map(list, zip(*map(self.ids, rows), strict=True))
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        if seen := [self.see(row) for row in rows if row.scene is not None]:
            types = tokens.eq(self.tokenizer.get_vocab()[VISION[2]]).long()
            grids = torch.tensor([[1, 4, 6]] * len(seen))
            inputs |= {"pixel_values": torch.cat(seen), "image_grid_thw": grids, "mm_token_type_ids": types}
        return inputs, nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=-100)


def loss_of(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of the answers' tokens, and the rows whose answers are right token by token."""
    states, wanted = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1], labels[:, 1:]
    logits, right = model.lm_head(states[wanted >= 0]), torch.ones_like(wanted, dtype=torch.bool)
    right[wanted >= 0] = logits.argmax(-1) == wanted[wanted >= 0]
    return nn.functional.cross_entropy(logits, wanted[wanted >= 0]), right.all(1)


def teach_tower(model: Any, reader: Reader, rows: list[Row], rng: random.Random) -> None:
    """Train the image tower to tell place, colour and shape of each cell, which answers alone teach slowly."""
    tower, names = model.model.visual, [*COLOURS]
    probe = nn.Linear(TOWER["out_hidden_size"], 6 + len(COLOURS) + 1 + len(SHAPES))
    adam = torch.optim.AdamW([*tower.parameters(), *probe.parameters()], lr=2e-3, betas=(0.9, 0.95))
    for step in range(TOWER_STEPS):
        batch = rng.sample(rows, 32)
        seen = tower(torch.cat([reader.see(row) for row in batch]), grid_thw=torch.tensor([[1, 4, 6]] * 32))
        logits = probe(seen.pooler_output).view(32, 6, -1).split([6, len(COLOURS) + 1, len(SHAPES)], -1)
        colours, shapes = torch.full((32, 6), len(COLOURS)), torch.full((32, 6), -100)
        for number, row in enumerate(batch):
            for cell, (colour, shape) in (row.scene or {}).items():
                colours[number, cell], shapes[number, cell] = names.index(colour), SHAPES.index(shape)
        pairs = zip(logits, (torch.arange(6).repeat(32, 1), colours, shapes), strict=True)
        losses = [nn.functional.cross_entropy(each.flatten(0, 1), wanted.flatten()) for each, wanted in pairs]
        adam.param_groups[0]["lr"] = 2e-3 * min(1.0, (TOWER_STEPS - step) / (0.5 * TOWER_STEPS))
        torch.stack(losses).sum().backward()
        adam.step()
        adam.zero_grad()
    print(
        "image tower: losses", *(f"{each.item():.4f}" for each in losses), "for places, colours and shapes", flush=True
    )


def make_target(folder: Path) -> None:
    """Train the target, print how many held-out answers are right, and write it."""
    long, short, rng = draw_rows(0, POOL // 2, turns=4), draw_rows(1, POOL), random.Random(1)
    tokenizer = build_tokenizer(long)
    model, reader = build_model(tokenizer), Reader(tokenizer)
    teach_tower(model, reader, [row for row in short if row.scene is not None], rng)
    model.model.visual.requires_grad_(False)  # the language model would unlearn it before it uses it
    inner = {name for name, each in model.named_parameters() if each.ndim == 2 and "language_model.layers." in name}
    matrices = [each for name, each in model.named_parameters() if name in inner]
    rest = [each for name, each in model.named_parameters() if name not in inner and each.requires_grad]
    muon, adam = Muon(matrices, lr=6e-3, weight_decay=0.0), torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95))
    for layer in model.model.language_model.layers:
        layer.compile(dynamic=True)
    for step in range(STEPS):
        batch = rng.sample(long, BATCH // 4) + rng.sample(short, BATCH - BATCH // 4)
        loss, _ = loss_of(model, *reader.batch(batch))
        loss.backward()
        for optimizer, peak in ((muon, 6e-3), (adam, 3e-3)):
            optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 30, (STEPS - step) / (0.6 * STEPS))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)
    for name, share in (("pictures", 1.0), ("texts", 0.0)):
        with torch.no_grad():
            held_out = draw_rows(7, 512, share)
            right = torch.cat([loss_of(model, *reader.batch(held_out[at : at + 64]))[1] for at in range(0, 512, 64)])
        print(f"held-out {name}: {right.float().mean():.1%} of {len(right)} answers are right, token by token")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reader.processor.save_pretrained(folder)


def write_prompts(folder: Path, name: str, rows: list[Row]) -> None:
    (folder / "shown").mkdir(parents=True, exist_ok=True)
    made = []
    for number, row in enumerate(rows):
        path = f"shown/{name}_{number}.png"
        if row.scene is not None:
            paint(row.scene).save(folder / path)
        made.append({"messages": row.messages(path)})
    write_jsonl(folder / f"{name}.jsonl", made)


def recipe_of(folder: Path, kind: str, head: dict[str, Any], seed: int) -> Recipe:
    name = f"{head['kind']}_{kind}_{seed}"
    values = {
        "run_dir": f"{folder}/{name}",
        "seed": seed,
        "target": {"path": f"{folder}/target", "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": f"{folder}/{kind}.jsonl",
            "heldout_prompts": f"{folder}/heldout.jsonl",
            "num_prompts": SAMPLES,
            "heldout_samples": 2 * HELD_OUT,
            "prompt_tokens": 96,
            "response_tokens": 48,
            "generate_batch": 32,
            "harvest_batch": 16,
            "dtype": "float32",
        },
        "head": head,
        "train": {
            "steps": HEAD_STEPS,
            "batch_size": 8,
            "unroll": DEPTH,
            "optimizer": "muon",
            "muon_learning_rate": 0.02,
            "learning_rate": 3e-3,
            "warmup_steps": 30,
            "checkpoint_every": HEAD_STEPS,
            "eval_prompts": 0,
        },
        "decode": {"depth": DEPTH, "max_new_tokens": 48},
    }
    path = folder / f"{name}.yaml"
    write_text(path, yaml.safe_dump(values))
    return load_recipe(path, [])


def taps_of(target: TargetModel, request: Request, text: list[int]) -> Tensor:
    images = None if request.images is None else request.images.over_text(text)
    taps = target.passes.forward(torch.tensor([text]), last_only=True, images=images).taps
    return taps


@torch.inference_mode()
def chain_steps(
    target: TargetModel, head: DraftHead, request: Request, written: list[int], other: Request | None
) -> int:
    """The steps in which chains give the target's text; `other` gives the head the states of its picture."""
    text = [*request.prompt, *written]
    taps = taps_of(target, request, text[:-1])
    if other is not None:
        assert request.images is not None
        places = request.images.inputs["mm_token_type_ids"][0].nonzero().flatten()
        taps[:, places] = taps_of(target, other, text[:-1])[:, places]
    levels = score_taps(head, taps, torch.tensor([text]), len(request.prompt), Sampling(), DEPTH)
    hits = [level.without_noise.argmax(1) == level.columns for level in levels]
    root, steps = len(request.prompt), 0  # the prefill chose its token
    while root < len(text) - 1:
        root += 1 + next((depth for depth, hit in enumerate(hits) if root > len(hit) or not hit[root - 1]), DEPTH)
        steps += 1
    return steps


def measure(recipe: Recipe) -> dict[str, float]:
    """The acceptance length of a trained head on each kind of held-out prompts."""
    config = TargetConfig.from_folder(Path(recipe.target.path))
    target, pictures = TargetModel.load(recipe.target, load_taps(recipe.head_dir, config)), KeptPictures(recipe)
    head = load_head_for(recipe.head_dir, target.frozen)
    requests = [pictures.request(row, 48) for row in read_jsonl(recipe.prompts_dir / "heldout.jsonl")]
    decoded = generate_batch(target, requests, head_drafter(head, Dynamic.chain(DEPTH)), 32)
    pairs = [(request, each.tokens) for request, each in zip(requests, decoded, strict=True)]
    seen = [pair for pair in pairs if pair[0].images is not None]
    texts = [pair for pair in pairs if pair[0].images is None]
    others = [request for request, _ in [*seen[1:], seen[0]]]

    def length(pairs: list[tuple[Request, list[int]]], others: Sequence[Request | None]) -> float:
        steps = sum(chain_steps(target, head, *pair, other) for pair, other in zip(pairs, others, strict=True))
        return sum(len(written) - 1 for _, written in pairs) / steps

    found = {"pictures": length(seen, [None] * len(seen)), "texts": length(texts, [None] * len(texts))}
    stats = DecodeStats.sum_of(each.stats for each in decoded)
    assert sum(chain_steps(target, head, *pair, None) for pair in pairs) == stats.steps
    return {**found, "permuted": length(seen, others)}


def compare_heads(folder: Path) -> None:
    """Train the heads that are missing, and print the table."""
    held_out = draw_rows(1000, 2 * HELD_OUT)
    write_prompts(folder, "heldout", held_out)
    told = {row.turns[0][0] for row in held_out if row.scene is None}
    for kind, share in SHARES.items():
        rows = [
            row for row in draw_rows(2000, 2 * SAMPLES, share) if row.scene is not None or row.turns[0][0] not in told
        ]
        write_prompts(folder, kind, rows)
    found: dict[str, list[dict[str, float]]] = {}
    for seed, (kind, head) in product(SEEDS, HEADS):
        train(recipe := recipe_of(folder, kind, head, seed), script=recipe.head.script)
        found.setdefault(f"{head['kind']}, {kind}", []).append(measured := measure(recipe))
        print(f"{head['kind']}, {kind}, seed {seed}: {measured}", flush=True)
    print(f"| head, trained on | {' | '.join(measured)} |\n| --- |{' ---: |' * len(measured)}")
    for name, each in found.items():
        print(f"| {name} | {' | '.join(' and '.join(f'{seed[kind]:.2f}' for seed in each) for kind in measured)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("target", "heads"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make_target(options.folder) if options.what == "target" else compare_heads(options.folder)


if __name__ == "__main__":
    main()
