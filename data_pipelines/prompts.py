"""The first stage: prompts as tokens, those to train on and those held out.

python -m data_pipelines.prompts recipes/tiny.yaml
"""

import random
from pathlib import Path

from data_pipelines.python_stdlib import source_files
from data_pipelines.stage import Json, Stage, file_digest, read_jsonl, write_jsonl
from data_pipelines.tokens import Tokenizer, encode_prompt, load_tokenizer
from heads.target_config import locate_target
from recipes import Recipe, run_command
from recipes.schema import PYTHON_STDLIB

CHARACTERS_PER_TOKEN = 12  # a generous bound, to cut text before it is encoded


def prompts_stage(recipe: Recipe) -> Stage:
    data = recipe.data
    source = data.prompts if data.prompts == PYTHON_STDLIB else file_digest(Path(data.prompts))
    inputs = {
        "data.prompts": source,
        "data.heldout_prompts": file_digest(data.heldout_prompts),
        "data.num_prompts": data.num_prompts,
        "data.prompt_tokens": data.prompt_tokens,
        "target.path": recipe.target.path,
        "seed": recipe.seed,
    }
    return Stage("prompts", recipe.prompts_dir, inputs)


def make_prompts(recipe: Recipe) -> Stage:
    """Write prompts/train.jsonl and prompts/heldout.jsonl, rows of {id, tokens}, unless they are there."""
    stage = prompts_stage(recipe)
    if stage.is_complete():
        return stage
    stage.begin()
    section = recipe.target
    tokenizer = load_tokenizer(locate_target(section.path, section.revision), section.trust_remote_code)
    data = recipe.data
    if data.prompts == PYTHON_STDLIB:
        train = stdlib_prompts(tokenizer, data.num_prompts, data.prompt_tokens, recipe.seed)
    else:
        train = file_prompts(tokenizer, Path(data.prompts), data.prompt_tokens, data.num_prompts)
    heldout = file_prompts(tokenizer, data.heldout_prompts, data.prompt_tokens, None)
    write_jsonl(stage.folder / "train.jsonl", train)
    write_jsonl(stage.folder / "heldout.jsonl", heldout)
    stage.finish({"train": len(train), "heldout": len(heldout), "cut": sum(row["cut"] for row in train + heldout)})
    return stage


def stdlib_prompts(tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[Json]:
    """Prompts of `length` tokens that begin with a line of the standard library; held-out files give none."""
    rng = random.Random(seed)
    texts = [file.text for file in source_files() if not file.held_out]
    weights = [len(text) for text in texts]
    tokens: list[list[int]] = []
    while len(tokens) < count:
        pieces = []
        for text in rng.choices(texts, weights, k=count - len(tokens)):
            start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
            pieces.append(text[start : start + length * CHARACTERS_PER_TOKEN])
        tokens += [
            encoded[:length] for encoded in tokenizer(pieces, verbose=False)["input_ids"] if len(encoded) >= length
        ]
    return [{"id": i, "tokens": row, "cut": False} for i, row in enumerate(tokens)]


def file_prompts(tokenizer: Tokenizer, path: Path, longest: int, count: int | None) -> list[Json]:
    """The first `count` prompts of a JSONL file (all for None), each cut to its last `longest` tokens."""
    rows: list[Json] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        if count is not None and len(rows) == count:
            break
        tokens = encode_prompt(tokenizer, row, f"{path} row {number}")
        rows.append({"id": len(rows), "tokens": tokens[-longest:], "cut": len(tokens) > longest})
    if not rows:
        raise ValueError(f"{path} holds no prompts; give at least one row")
    return rows


def main() -> None:
    run_command(__doc__, lambda recipe: print(recipe.prompts_dir, make_prompts(recipe).facts()))


if __name__ == "__main__":
    main()
