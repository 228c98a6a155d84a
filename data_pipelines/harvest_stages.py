"""The stages before training, in one process: prompts, responses and features, all shards or some of them."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile

import torch
from accelerate import PartialState

from headstart.common.remote import files_in, pull
from headstart.data_pipelines.features.features import TapTexts, finite_states, refuse_non_finite, tap, write_features
from headstart.data_pipelines.features.shard_files import made_from, shard_is_whole
from headstart.data_pipelines.features.shards import MANIFEST, stored_taps, write_manifest
from headstart.data_pipelines.features.store import describe_store, existing_store
from headstart.data_pipelines.features.vllm_states import VllmStates, own_target
from headstart.data_pipelines.more_prompts import (
    claim_features,
    remove_grown_shards,
    take_over_features,
    take_over_responses,
)
from headstart.data_pipelines.preflight import check_disk
from headstart.data_pipelines.prompts.completion_client import CompletionClient
from headstart.data_pipelines.prompts.prompts import describe_prompts, make_prompts, write_self_prompts
from headstart.data_pipelines.prompts.responses import (
    Ending,
    Writer,
    describe_responses,
    finish_responses,
    is_answered,
    never,
    refuse_pictures,
    responses_path,
    responses_stage,
    server_writer,
    speculative_writer,
    target_writer,
    write_given,
    write_responses,
)
from headstart.data_pipelines.stages.shard_work import ShardProgress, ShardPrompts, prompt_shards, run_stage
from headstart.data_pipelines.stages.stage import WEIGHTS, Stage, digest_of, file_digest
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_taps
from headstart.heads.target_config import TargetConfig, TargetOrigin, folder_of, target_identity
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe

STORE_FORMAT = 3  # version of the shards and of the manifest
CHECKED_PROMPTS, CHECKED_TOKENS_MAX = 3, 64  # whose hidden states by vLLM are compared with our own
LOGITS_TOLERANCE = 0.05  # share of the largest logit; bfloat16 rounding errors are much smaller


class OneTarget:
    """The recipe's target, which the stages of a process share: loaded on first use, with taps of harvest and head."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._target: TargetModel | None = None

    def __call__(self) -> TargetModel:
        if self._target is None:
            config = TargetConfig.from_folder(folder_of(self.recipe.target))
            taps = {*taps_to_store(self.recipe, config), *head_taps(self.recipe.head, config)}
            self._target = TargetModel.load_to_answer(self.recipe.target, tuple(sorted(taps)))
        return self._target

    @property
    def is_loaded(self) -> bool:
        return self._target is not None

    def free(self) -> None:
        if self.is_loaded:
            self._target = None
            gc.collect()  # compiled layers refer to themselves


@contextmanager
def harvest_of(
    recipe: Recipe, state: PartialState, ending: Ending = never, shared: OneTarget | None = None
) -> Iterator["Harvest"]:
    """The stages of a process that may write them; a target that is not `shared` with training is freed at the end."""
    config = TargetConfig.from_folder(folder_of(recipe.target))
    target = shared or OneTarget(recipe)
    try:
        yield Harvest(recipe, state, config, taps_to_store(recipe, config), target, ending)
    finally:
        if shared is None:
            target.free()


@dataclass(frozen=True)
class Harvest:
    """The stages before training. One that is complete and matches the recipe is reused.

    If prompts were added, the responses and features of the earlier ones are kept. Every stage raises ValueError if
    its files were made from other inputs.
    """

    recipe: Recipe
    state: PartialState
    config: TargetConfig
    taps: tuple[int, ...]
    load: Callable[[], TargetModel]
    ending: Ending = never  # once true, finish running texts and start no new ones

    def say(self, line: str) -> None:
        if self.state.is_main_process:
            print(line, flush=True)

    @contextmanager
    def main_rank_first(self) -> Iterator[None]:
        """Let the other ranks begin after the main one, with its files."""
        with self.state.main_process_first():
            pull(self.recipe.data_folder)
            yield

    @cached_property
    def shards(self) -> list[ShardPrompts]:
        """The prompts, once they are made, as they are divided into shards."""
        return prompt_shards(self.recipe)

    def prompts(self) -> Stage:
        write_self_prompts(self.recipe, self.load)
        with self.main_rank_first():
            stage = make_prompts(self.recipe)
        self.say(describe_prompts(self.recipe))
        return stage

    def responses(self, prompts: Stage) -> Stage | None:
        """The target's answers to the prompts; None with data.store, which needs none."""
        recipe, shards = self.recipe, self.shards
        if recipe.data.store is not None:
            return None
        responses = self.open_responses(prompts)
        finish = partial(finish_responses, recipe, responses, shards)
        run_stage(responses, self.state, partial(self.make_responses, shards), finish)
        self.say(describe_responses(recipe, responses))
        return responses

    def open_responses(self, prompts: Stage) -> Stage:
        """The stage, with earlier responses taken over; raises ValueError if the disk cannot hold all features."""
        recipe, rows = self.recipe, [row for shard in self.shards for row in shard.rows]
        responses = responses_stage(recipe, prompts)
        with self.main_rank_first():
            take_over_responses(recipe, responses, self.shards)
        if not responses.is_complete() and recipe.data.online is None:
            prompt_tokens = sum(len(row["tokens"] + row.get("response", [])) for row in rows)
            written = recipe.data.response_tokens * len(rows) if recipe.data.responses == "target" else 0
            self.say(check_disk(recipe, self.config, self.taps, prompt_tokens, prompt_tokens + written))
        return responses

    def make_responses(self, shards: Sequence[ShardPrompts]) -> None:
        """Write this rank's share of the responses, by the writer that the recipe names."""
        recipe, data, ranks = self.recipe, self.recipe.data, Ranks()
        if all(is_answered(recipe, shard) for shard in shards):
            return
        if data.responses == "given":
            for shard in ranks.share(shards):
                write_given(recipe, shard)
            return
        if data.server is not None:
            refuse_pictures(recipe, shards)
            client = CompletionClient(data.server) if data.states is None else self.vllm.client
            writer = server_writer(recipe, client, self.ending)
        elif data.draft_head is not None:
            writer, ranks = speculative_writer(recipe, data.draft_head, self.ending)
        else:
            writer, ranks = target_writer(recipe, self.load(), self.ending), self.load().ranks
            check_states(recipe, self.load(), shards, self.taps)

        def work(write: Writer) -> None:
            share = ranks.share(shards)
            with ShardProgress(share, self.state, "responses", data.generate_batch) as meter:
                write_responses(recipe, write, share, meter)

        ranks.carry_out(writer, work)

    def features(self, prompts: Stage, responses: Stage | None) -> Stage:
        """The target's hidden states: data.store if the recipe names one; with data.online the responses instead."""
        recipe, shards = self.recipe, self.shards
        if responses is None:
            assert recipe.data.store is not None
            pull(recipe.data.store)
            taps = stored_taps(head_taps(recipe.head, self.config), self.config.num_layers)
            return existing_store(recipe, recipe.data.store, taps)
        if recipe.data.online is not None:
            return responses
        features = self.features_stage(responses)
        identities = self.identities(shards, responses.facts()["files"])
        with self.main_rank_first():
            take_over_features(recipe, features, shards, identities)
        if not features.is_complete():
            tokens = responses.facts()["prompt_tokens"] + responses.facts()["response_tokens"]
            self.say(check_disk(recipe, self.config, self.taps, tokens, tokens))
        make = partial(self.make_features, shards, identities)
        finish = partial(self.finish_features, features, prompts, responses)
        run_stage(features, self.state, make, finish)
        self.say(describe_store(features.folder))
        return features

    def make_features(self, shards: Sequence[ShardPrompts], identities: dict[str, str]) -> None:
        """Write this rank's share of the features."""
        recipe, ranks = self.recipe, Ranks()
        files = [shard.features_file for shard in shards]
        if all(shard_is_whole(recipe.features_dir / file, identities[file]) for file in files):
            return
        if recipe.data.states is not None:
            refuse_pictures(recipe, shards)
            tap_texts, device = self.vllm.tap, torch.device("cpu")
        else:
            target = self.load()
            check_states(recipe, target, shards, self.taps)
            check_teacher_logits(recipe, target, shards[0].rows[0]["tokens"])
            if self.config.has_towers and not any("images" in row for shard in self.shards for row in shard.rows):
                self.say(f"{recipe.target.path} reads more than text; its heads are trained on text alone")
            tap_texts, device, ranks = partial(tap, target, taps=self.taps), target.device, target.ranks
        share = ranks.share(shards)

        def work(tap_texts: TapTexts) -> None:
            with ShardProgress(share, self.state, "features") as meter:
                begun = takewhile(lambda shard: not self.ending(), share)
                write_features(recipe, self.taps, tap_texts, device, begun, identities, meter)

        ranks.carry_out(tap_texts, work)

    def features_stage(self, responses: Stage | None) -> Stage:
        """The last stage; its input `responses` is None while some may be missing."""
        recipe = self.recipe
        inputs = {
            "responses": None if responses is None else digest_of(responses.facts()["files"]),
            WEIGHTS: target_identity(folder_of(recipe.target)),
            "target.dtype": recipe.target.dtype,
            "taps": self.taps,
            "data.dtype": recipe.data.dtype,
            "format": STORE_FORMAT,
        }
        if recipe.data.states is not None:
            inputs["data.states"] = recipe.data.states
        return Stage.of(recipe, "features", inputs)

    def finish_features(self, features: Stage, prompts: Stage, responses: Stage) -> None:
        """Write the manifest: the shards and all of their inputs."""
        data, target = self.recipe.data, self.recipe.target
        origin = TargetOrigin.of(folder_of(target))
        about = {
            "taps": features.inputs["taps"],
            "dtype": data.dtype,
            "target": {"path": target.path, "revision": target.revision, **origin.to_config()},
            "mask_rule": f"{data.turns} turns of the assistant" if data.responses == "given" else "response",
            "written_by": responses.facts().get("written_by"),
            "temperatures": data.temperatures if data.responses == "target" else None,
            "prompts_sha256": prompts.facts().get("sha256"),
            "chat_template_sha256": prompts.facts().get("chat_template"),
            "made_from": features.inputs,
        }
        write_manifest(features.folder, [shard.features_file for shard in self.shards], about)
        features.finish({"manifest": file_digest(features.folder / MANIFEST)})

    @cached_property
    def vllm(self) -> VllmStates:
        """The servers of data.states, whose hidden states of a few prompts were compared with the target's."""
        recipe, states = self.recipe, VllmStates(self.recipe, self.config, self.taps)
        texts = [row["tokens"][:CHECKED_TOKENS_MAX] for row in self.shards[0].rows[:CHECKED_PROMPTS]]
        if not self.state.is_main_process:
            return states
        if (target := own_target(recipe, self.config)) is not None:
            check_teacher_logits(recipe, target, texts[0])
            states.refuse_other_states(target, texts)
        else:
            self.say(f"{recipe.target.path} is too large to load here, so only vLLM's last state is checked")
            frozen = FrozenTarget.from_folder(folder_of(recipe.target), getattr(torch, recipe.target.dtype))
            states.refuse_other_last_state(frozen, texts)
        return states

    # For independent processes: parts of the harvest, and workers of a cluster

    def begin(self) -> Stage:
        """Make the prompts, and record the inputs of the shards; the caller holds the folder."""
        prompts = self.prompts()
        responses = self.open_responses(prompts)
        if not responses.is_complete():
            responses.claim()
        if self.recipe.data.online is None:
            claim_features(self.features_stage(responses if responses.was_complete() else None))
        return prompts

    def make(self, shards: Sequence[ShardPrompts]) -> None:
        """Make the responses and then the features of these shards; existing files are kept."""
        self.make_responses(shards)
        if self.recipe.data.online is None and not self.ending():
            identities = self.identities(shards)
            remove_grown_shards(self.recipe, shards, identities)
            self.make_features(shards, identities)

    def identities(self, shards: Sequence[ShardPrompts], texts: Mapping[str, str] | None = None) -> dict[str, str]:
        """The identity of the inputs of each shard of features, by file name: its own texts, not the others.

        `texts` are digests of the responses, by file name; without them the files are read.
        """
        if texts is None:
            texts = {shard.responses_file: file_digest(responses_path(self.recipe, shard)) for shard in shards}
        inputs = self.features_stage(None).inputs
        common = {name: value for name, value in inputs.items() if name != "responses"}
        return {shard.features_file: digest_of([common, texts[shard.responses_file]]) for shard in shards}

    def finish(self, prompts: Stage) -> Stage | None:
        """The last stage with its manifest if all shards exist, else None; the caller holds the folder."""
        return None if self.missing() else self.features(prompts, self.responses(prompts))

    def missing(self) -> list[ShardPrompts]:
        """The shards without responses, or without features of these responses."""
        pull(self.recipe.data_folder)
        recipe, is_online = self.recipe, self.recipe.data.online is not None
        features = {path.name: path for path in files_in(recipe.features_dir, ".safetensors")}

        def is_there(shard: ShardPrompts) -> bool:
            return responses_path(recipe, shard).exists() and (is_online or shard.features_file in features)

        absent = [shard for shard in self.shards if not is_there(shard)]
        if absent or is_online:
            return absent
        changed = {name for name, its in self.identities(self.shards).items() if made_from(features[name]) != its}
        return [shard for shard in self.shards if shard.features_file in changed]


def taps_to_store(recipe: Recipe, config: TargetConfig) -> tuple[int, ...]:
    """The head's taps; or all taps of an existing store, finished or not, if it includes the head's."""
    taps = stored_taps(head_taps(recipe.head, config), config.num_layers)
    recorded = Stage("features", recipe.features_dir, {}).claimed_for()
    return tuple(recorded["taps"]) if recorded is not None and set(taps) <= set(recorded["taps"]) else taps


def check_states(recipe: Recipe, target: TargetModel, shards: Sequence[ShardPrompts], taps: tuple[int, ...]) -> None:
    """Raise ValueError if the target's states of the first prompt are not finite, before it writes or reads all."""
    states, of = tap(target, [shards[0].rows[0]["tokens"]], taps=taps), "the first prompt"
    if recipe.data.online is None:
        finite_states(recipe, states, taps, of)
    else:  # nothing is stored in data.dtype
        refuse_non_finite(recipe.target.dtype, states, of)


def check_teacher_logits(recipe: Recipe, target: TargetModel, prompt: list[int]) -> None:
    """Raise ValueError if the target's logits are not its lm_head over its final norm, which training relies on."""
    output = target.passes.forward(torch.tensor([prompt], device=target.device), last_only=True)
    frozen = FrozenTarget.from_folder(folder_of(recipe.target), target.dtype, target.device)
    frozen.refuse_other_logits(output.logits[0].float(), output.last_hidden[0, -1:], LOGITS_TOLERANCE)
