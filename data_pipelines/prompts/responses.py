"""The second stage: the texts to train on, as tokens: the target's answers to the prompts, or given conversations."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.common.files import append_jsonl, read_jsonl, remove, resume_jsonl, write_jsonl
from headstart.data_pipelines.prompts.completion_client import CompletionClient, completion
from headstart.data_pipelines.prompts.prompts import num_tokens
from headstart.data_pipelines.prompts.selection import images_of
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts, texts_together
from headstart.data_pipelines.stages.stage import WEIGHTS, Json, Stage, digest_of, file_digest, generation_identity
from headstart.heads.kinds.checkpoint import load_head_for, load_taps
from headstart.heads.target_config import TargetConfig, folder_of, target_identity
from headstart.inference.core.drafter import Drafter
from headstart.inference.core.sampling import Sampling
from headstart.inference.drafters.build import growth_from_recipe
from headstart.inference.drafters.for_heads import head_drafter
from headstart.inference.drafters.growth import Growth
from headstart.inference.engine.loop import generate_each
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.images.kept import ROUNDS_IN_MEMORY, KeptPictures
from headstart.inference.targets.model import TargetModel, ends_of_answers
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe

# Rows of prompts and the sampling of each -> (number of the prompt, tokens written after it), as each text ends.
Writer = Callable[[list[Json], list[Sampling]], Iterator[tuple[int, list[int]]]]
Ending = Callable[[], bool]  # once true, finish running texts and start no new ones


def never() -> bool:
    return False


def responses_stage(recipe: Recipe, prompts: Stage) -> Stage:
    data, made = recipe.data, prompts.facts()
    inputs = {
        "prompts": digest_of([made["sha256"], made["heldout_sha256"]]),
        "data.heldout_samples": data.heldout_samples,
        "data.shard_samples": data.shard_samples,
    }
    if data.responses == "target":
        target = folder_of(recipe.target)
        inputs |= {
            WEIGHTS: target_identity(target),
            "the target's generation_config.json": generation_identity(target),
            "target.dtype": recipe.target.dtype,
            "data.response_tokens": data.response_tokens,
            "data.temperatures": data.temperatures,
            "seed": recipe.seed,
        }
        if data.server_writes or data.draft_head is not None:
            inputs["written_by"] = written_by(recipe)
    return Stage.of(recipe, "responses", inputs)


def written_by(recipe: Recipe) -> str:
    """The source of the responses, for the manifest."""
    if recipe.data.responses == "given":
        return "whoever wrote data.prompts"
    if recipe.data.server_writes:
        return "the server of data.server"
    return "plain decoding" if recipe.data.draft_head is None else "speculative decoding"


def responses_path(recipe: Recipe, shard: ShardPrompts) -> Path:
    return recipe.responses_dir / shard.responses_file


def journal_of(path: Path) -> Path:
    """The file of finished responses of a shard that is not complete."""
    return path.with_name(path.name + ".journal")


def is_answered(recipe: Recipe, shard: ShardPrompts) -> bool:
    path = responses_path(recipe, shard)
    return path.exists() and not journal_of(path).exists()


@dataclass(frozen=True)
class Response:
    """A sample without its features: its tokens, which of them are trained on, and the pictures of its prompt."""

    tokens: list[int]
    loss_mask: list[bool]
    images: Json | None = None  # as `KeptPictures` reads them

    @classmethod
    def from_row(cls, row: Json) -> "Response":
        tokens = row["prompt"] + row["response"]
        mask = [False] * len(tokens)
        for start, end in row.get("spans", [(len(row["prompt"]), len(tokens))]):
            mask[start:end] = [True] * (end - start)
        return cls(tokens, mask, row.get("images"))


def read_texts(path: Path) -> list[Response]:
    """The texts of a shard's responses."""
    return [Response.from_row(row) for row in read_jsonl(path)]


def write_given(recipe: Recipe, shard: ShardPrompts) -> None:
    """Write the given conversations of a shard, which the prompts stage has tokenized, as responses."""
    rows = [
        {"prompt" if name == "tokens" else name: value for name, value in row.items() if name != "cut"}
        for row in shard.rows
    ]
    write_jsonl(responses_path(recipe, shard), rows)


def write_responses(recipe: Recipe, writer: Writer, shards: Sequence[ShardPrompts], meter: ShardProgress) -> None:
    """Write the responses to the prompts of these shards; the samples use the recipe's temperatures in turn.

    The writer gets the prompts of all shards at once, so that its batch stays full until the last prompts. Each
    finished response is appended to the journal of its shard, so a killed run loses only the unfinished ones.
    """
    work: list[tuple[Journal, Json]] = []
    for shard in shards:
        path = responses_path(recipe, shard)
        if path.exists():
            remove(journal_of(path))  # left by a kill just before its removal
            meter.skip(len(shard.rows))
            continue
        journal = Journal(path, shard)
        meter.skip(len(journal.done))
        work += [(journal, row) for row in shard.rows if row["id"] not in journal.done]
    samplings = [sampling_of(recipe, journal.shard.split, row["id"]) for journal, row in work]
    for number, tokens in writer([row for _, row in work], samplings) if work else ():
        journal, row = work[number]
        temperature = samplings[number].temperature
        text = {"id": row["id"], "prompt": row["tokens"], "response": tokens, "temperature": temperature}
        journal.add({**text, **images_of(row)})
        meter.add(1, len(tokens))


class Journal:
    """The finished responses of a shard, one line each; it becomes the shard's file when complete."""

    def __init__(self, path: Path, shard: ShardPrompts) -> None:
        self.path, self.shard = path, shard
        self.done: dict[int, Json] = {row["id"]: row for row in resume_jsonl(journal_of(path))}
        self._finish_if_complete()

    def add(self, row: Json) -> None:
        append_jsonl(journal_of(self.path), [row])
        self.done[row["id"]] = row
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if len(self.done) == len(self.shard.rows):
            write_jsonl(self.path, [self.done[row["id"]] for row in self.shard.rows])
            remove(journal_of(self.path))


def sampling_of(recipe: Recipe, split: str, number: int) -> Sampling:
    """The sampling of response `number`; it does not depend on shard, batch, rank or resume."""
    temperatures = recipe.data.temperatures
    seed = zlib.crc32(f"{recipe.seed} {split} {number}".encode())
    return Sampling(temperatures[number % len(temperatures)], seed=seed)


def refuse_nothing_to_learn(recipe: Recipe, split: str, texts: list[Response]) -> None:
    """Raise ValueError unless a token of some text can be predicted by a head, which reads two tokens before it."""
    source = "data.prompts" if split == "train" else "data.heldout_prompts"
    if all(is_empty(recipe, text) for text in texts):
        advice = "give prompts in the form that it answers, such as messages, or choose data.responses=given"
        raise ValueError(f"{source}: the target's responses to all {len(texts)} prompts are empty; {advice}")
    if not any(any(text.loss_mask[2:]) for text in texts):
        problem = f"{source}: none of the {len(texts)} texts is trained on after its second token, where a head begins"
        raise ValueError(f"{problem}; train on more of each text (loss_mask, data.turns), or lengthen the prompts")


def is_empty(recipe: Recipe, text: Response) -> bool:
    """Whether a response is empty: no token, or only the target's end token."""
    written = sum(text.loss_mask)
    return written == 0 or (recipe.data.responses == "target" and written == 1 < recipe.data.response_tokens)


def finish_responses(recipe: Recipe, stage: Stage, shards: Sequence[ShardPrompts]) -> None:
    paths = {responses_path(recipe, shard): shard.split for shard in shards}
    texts_of = {path: read_texts(path) for path in paths}
    for split in dict.fromkeys(paths.values()):
        refuse_nothing_to_learn(
            recipe, split, [text for path in paths if paths[path] == split for text in texts_of[path]]
        )
    texts = [text for each in texts_of.values() for text in each]
    trained_on = sum(sum(text.loss_mask) for text in texts)
    is_written = recipe.data.responses == "target"
    stage.finish(
        {
            "samples": len(texts),
            "cut": sum(sum(text.loss_mask) == recipe.data.response_tokens for text in texts) if is_written else 0,
            "empty": sum(is_empty(recipe, text) for text in texts),
            "prompt_tokens": sum(len(text.tokens) for text in texts) - trained_on,
            "response_tokens": trained_on,
            "written_by": written_by(recipe),
            "files": {path.name: file_digest(path) for path in paths},
        }
    )


def describe_responses(recipe: Recipe, stage: Stage) -> str:
    """One line for the user: the number of responses and tokens, their source, and how many were cut."""
    facts = stage.facts()
    parts = [
        f"responses: {facts['samples']:,} by {facts['written_by']}",
        f"{facts['response_tokens']:,} tokens to train on after {facts['prompt_tokens']:,} others",
    ]
    if facts["cut"]:
        parts.append(f"{facts['cut']:,} stopped at data.response_tokens={recipe.data.response_tokens}")
    if facts["empty"]:
        parts.append(f"{facts['empty']:,} are empty, or an end token alone")
    return "; ".join(parts)


def target_writer(
    recipe: Recipe,
    target: TargetModel,
    ending: Ending = never,
    drafter: Drafter | None = None,
    max_batch: int | None = None,
) -> Writer:
    """Write responses with our own decoding, one seed per sample; a drafter changes the speed, never the text.

    At most `max_batch` decode together, by default as many as fit. All ranks must call this. Raises ValueError for a
    target whose generation_config.json has unsupported settings.
    """
    if max_batch is None:
        max_batch = texts_together(recipe, target, recipe.data.longest_sample)
    defaults, most = TargetDefaults.of(target), recipe.data.response_tokens  # a server applies them, too
    pictures = KeptPictures(recipe)

    def write(prompts: list[Json], samplings: list[Sampling]) -> Iterator[tuple[int, list[int]]]:
        pairs = list(zip(prompts, samplings, strict=True))
        together = ROUNDS_IN_MEMORY * max_batch if any("images" in row for row in prompts) else len(pairs)
        for first in range(0, len(pairs), together):
            some = pairs[first : first + together]
            requests = [defaults.applied(pictures.request(row, most, sampling)) for row, sampling in some]
            for number, generation in generate_each(target, requests, drafter, max_batch, ending):
                yield first + number, generation.tokens
            if ending():
                return

    return write


def speculative_writer(recipe: Recipe, folder: Path, ending: Ending = never) -> tuple[Writer, Ranks]:
    """Write responses by speculative decoding with the head in `folder`; also returns the target's ranks."""
    config = TargetConfig.from_folder(folder_of(recipe.target))
    target = TargetModel.load_to_answer(recipe.target, load_taps(folder, config))
    head = load_head_for(folder, target.frozen)
    max_batch = texts_together(recipe, target, recipe.data.longest_sample, Growth.from_section(recipe.decode).max_nodes)
    growth = growth_from_recipe(recipe.decode, target, head, batch=max_batch)
    return target_writer(recipe, target, ending, head_drafter(head, growth), max_batch), target.ranks


def refuse_pictures(recipe: Recipe, shards: Sequence[ShardPrompts]) -> None:
    """Raise ValueError for prompts with images, which servers do not get as tokens."""
    if count := sum("images" in row for shard in shards for row in shard.rows):
        field = "data.server" if recipe.data.states is None else "data.states"
        given = f"{field}: {vars(recipe.data)[field[5:]]} given for {count} prompts with images, only text is allowed"
        raise ValueError(f"{given}; leave {field} out, so that this process reads them, or name other data.prompts")


def server_writer(recipe: Recipe, client: CompletionClient, ending: Ending = never) -> Writer:
    """Write responses with OpenAI-compatible servers that run the target."""
    vocab_size, ends = num_tokens(recipe), frozenset(ends_of_answers(recipe.target))

    def write(prompts: list[Json], samplings: list[Sampling]) -> Iterator[tuple[int, list[int]]]:
        pairs = zip(prompts, samplings, strict=True)
        bodies = [completion(row["tokens"], sampling, recipe.data.response_tokens) for row, sampling in pairs]
        for number, answer in client.each(bodies, recipe.data.generate_batch):
            if recipe.data.states is not None and answer.states_path is not None:
                with answer.written_states():
                    pass  # remove the states of the prompt; the full text is sent again later
            yield number, answer.tokens(vocab_size, ends)
            if ending():
                return

    return write
