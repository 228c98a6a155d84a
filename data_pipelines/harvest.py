"""From prompts to features: the target answers each prompt, then one forward over each text taps its hidden states.

    accelerate launch -m headstart.data_pipelines.harvest recipes/tiny.yaml

Both stages write whole shards by sample id, so a killed run can resume, with a different number of ranks if you like.
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from accelerate import PartialState

from headstart.common.errors import CONTINUES
from headstart.common.process import end_with_launcher
from headstart.common.remote import pull, shown
from headstart.data_pipelines.features.features import TapTexts, finite_states, refuse_non_finite, tap, write_features
from headstart.data_pipelines.features.shards import MANIFEST, stored_taps, write_manifest
from headstart.data_pipelines.features.store import describe_store, existing_store
from headstart.data_pipelines.more_prompts import take_over_features, take_over_responses
from headstart.data_pipelines.preflight import check_disk, check_harvest
from headstart.data_pipelines.prompts.prompts import describe_prompts, make_prompts, write_own_candidates
from headstart.data_pipelines.prompts.responses import (
    Writer,
    describe_responses,
    finish_responses,
    responses_stage,
    server_writer,
    speculative_writer,
    target_writer,
    write_given,
    write_responses,
)
from headstart.data_pipelines.stages.shard_work import (
    ShardProgress,
    ShardPrompts,
    idle_cores,
    prompt_shards,
    run_stage,
    start_processes,
)
from headstart.data_pipelines.stages.stage import Stage, file_digest
from headstart.data_pipelines.stages.target_files import WEIGHTS, digest_of
from headstart.data_pipelines.together import hold_folder, refuse_differences, run_together
from headstart.heads.checkpoint import head_taps
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, locate_target
from headstart.heads.target_origin import target_identity
from headstart.inference.targets.loading import slow_format
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.ranks import Ranks
from headstart.recipes import Recipe, run_command

STORE_FORMAT = 3  # version of the shards and of the manifest
LOGITS_TOLERANCE = 0.05  # share of the largest logit; bfloat16 rounding stays well below it


def run(recipe: Recipe) -> None:
    """The command: harvest on all ranks of the launch."""
    end_with_launcher()
    start_processes()
    with run_together(recipe, "harvest", partial(check_harvest, recipe)):
        print(f"complete in {shown(harvest(recipe).folder)}")


def harvest(recipe: Recipe) -> Stage:
    """Run the missing stages of prompts, responses and features, on all ranks together; returns the last stage."""
    with open_harvest(recipe) as stages:
        prompts = stages.prompts()
        responses = stages.responses(prompts)
        return stages.features(prompts, responses)


@contextmanager
def open_harvest(recipe: Recipe) -> Iterator["Harvest"]:
    """Hold the folder of the data for ranks that agree on its target; the target is freed at the end."""
    state = PartialState()
    if state.is_main_process:
        for hint in filter(None, (idle_cores(state), slow_format("target.dtype", recipe.target.dtype, state.device))):
            print(hint)
    with ExitStack() as stack:
        shared = recipe.data.folder
        if shared is not None and shared.resolve() != recipe.run_dir.resolve():  # another recipe may fill it already
            stack.enter_context(hold_folder(state, "data.folder", shared, "harvest", wait=True))
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        target = locate_target(recipe.target.path, recipe.target.revision)
        refuse_differences(state, {"config and weights of target.path": target_identity(target)[:12]})
        config = TargetConfig.from_folder(target)
        taps = taps_to_store(recipe, config)
        load = cache(partial(TargetModel.load_to_answer, recipe.target, taps))  # loads on first use, once
        stack.callback(load.cache_clear)
        yield Harvest(recipe, state, config, taps, load)


@dataclass(frozen=True)
class Harvest:
    """The stages before training. One that is complete and matches the recipe is reused.

    If there are more prompts than before, what was made from the others is kept. Every stage raises ValueError if its
    files were made from other inputs.
    """

    recipe: Recipe
    state: PartialState
    config: TargetConfig
    taps: tuple[int, ...]
    load: Callable[[], TargetModel]

    def say(self, line: str) -> None:
        if self.state.is_main_process:
            print(line, flush=True)

    @contextmanager
    def main_rank_first(self) -> Iterator[None]:
        """Let the other ranks begin when the main one has ended, with what it wrote."""
        with self.state.main_process_first():
            pull(self.recipe.data_folder)
            yield

    @cached_property
    def shards(self) -> list[ShardPrompts]:
        """The prompts, once they are made, as they are divided into shards."""
        return prompt_shards(self.recipe)

    def prompts(self) -> Stage:
        write_own_candidates(self.recipe, self.load)
        with self.main_rank_first():
            stage = make_prompts(self.recipe)
        self.say(describe_prompts(self.recipe))
        return stage

    def responses(self, prompts: Stage) -> Stage | None:
        """The target's answers to the prompts; None with data.store, which needs none."""
        recipe, shards = self.recipe, self.shards
        if recipe.data.store is not None:
            return None
        responses = responses_stage(recipe, prompts)
        with self.main_rank_first():
            take_over_responses(recipe, responses, shards)
        if recipe.data.online is None and not responses.is_complete():
            rows = [row for shard in shards for row in shard.rows]
            given = sum(len(row["text"] if "text" in row else row["tokens"]) for row in rows)
            written = recipe.data.response_tokens * len(rows) if recipe.data.responses == "target" else 0
            self.say(check_disk(recipe, self.config, self.taps, given, given + written))
        run_stage(responses, self.state, self.make_responses, partial(finish_responses, recipe, responses, shards))
        self.say(describe_responses(recipe, responses))
        return responses

    def make_responses(self) -> None:
        """Write this rank's share of the responses, by the writer that the recipe names."""
        recipe, data, shards, ranks = self.recipe, self.recipe.data, self.shards, Ranks()
        if data.responses == "given":
            for shard in ranks.share(shards):
                write_given(recipe, shard)
            return
        if data.server is not None:
            writer = server_writer(recipe, data.server)
        elif data.draft_head is not None:
            writer, ranks = speculative_writer(recipe, data.draft_head)
        else:
            writer, ranks = target_writer(recipe, self.load()), self.load().ranks
            check_states(recipe, self.load(), shards)

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
        features = features_stage(recipe, responses, self.taps)
        made_from = shard_identities(features, responses, shards)
        with self.main_rank_first():
            take_over_features(recipe, features, shards, made_from)
        make = partial(self.make_features, responses, made_from)
        finish = partial(finish_features, recipe, features, shards, prompts, responses)
        run_stage(features, self.state, make, finish)
        self.say(describe_store(features.folder))
        return features

    def make_features(self, responses: Stage, made_from: dict[str, str]) -> None:
        """Write this rank's share of the features; raises ValueError if the disk cannot hold those of all ranks."""
        recipe, shards, target = self.recipe, self.shards, self.load()
        check_states(recipe, target, shards)
        check_teacher_logits(recipe, target, shards[0].rows[0]["tokens"])
        if self.config.has_towers:
            self.say(f"{recipe.target.path} reads more than text; its heads are trained on text alone")
        tokens = responses.facts()["prompt_tokens"] + responses.facts()["response_tokens"]
        self.say(check_disk(recipe, target.config, target.taps, tokens, tokens))
        share = target.ranks.share(shards)

        def work(tap_texts: TapTexts) -> None:
            with ShardProgress(share, self.state, "features") as meter:
                write_features(recipe, target.taps, tap_texts, target.device, share, made_from, meter)

        target.ranks.carry_out(partial(tap, target), work)


def taps_to_store(recipe: Recipe, config: TargetConfig) -> tuple[int, ...]:
    """The head's taps; or all taps of an existing store, finished or not, if it includes the head's."""
    taps = stored_taps(head_taps(recipe.head, config), config.num_layers)
    found = Stage("features", recipe.features_dir, {}).claimed_for()
    return tuple(found["taps"]) if found is not None and set(taps) <= set(found["taps"]) else taps


def features_stage(recipe: Recipe, responses: Stage, taps: tuple[int, ...]) -> Stage:
    inputs = {
        "responses": digest_of(responses.facts()["files"]),
        WEIGHTS: target_identity(locate_target(recipe.target.path, recipe.target.revision)),
        "target.dtype": recipe.target.dtype,
        "taps": taps,
        "data.dtype": recipe.data.dtype,
        "format": STORE_FORMAT,
    }
    return Stage.of(recipe, "features", inputs)


def shard_identities(features: Stage, responses: Stage, shards: list[ShardPrompts]) -> dict[str, str]:
    """The identity of the inputs of each shard of features, by file name: its own texts, not the others."""
    common = {name: value for name, value in features.inputs.items() if name != "responses"}
    files = responses.facts()["files"]
    return {shard.features_file: digest_of([common, files[shard.responses_file]]) for shard in shards}


def check_states(recipe: Recipe, target: TargetModel, shards: list[ShardPrompts]) -> None:
    """Raise ValueError if the target's states of the first prompt are not finite, before it writes or reads all."""
    states, of = tap(target, [shards[0].rows[0]["tokens"]]), "the first prompt"
    if recipe.data.online is None:
        finite_states(recipe, states, target.taps, of)
    else:  # nothing is stored in data.dtype
        refuse_non_finite(recipe.target.dtype, states, of)


def check_teacher_logits(recipe: Recipe, target: TargetModel, prompt: list[int]) -> None:
    """Raise ValueError if the target's logits are not its lm_head over its final norm, which training relies on."""
    output = target.forward(torch.tensor([prompt], device=target.device), last_only=True)
    folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(folder, target.dtype, target.device)
    frozen.refuse_other_logits(output.logits[0].float(), output.last_hidden[0, -1:], LOGITS_TOLERANCE)


def finish_features(
    recipe: Recipe, features: Stage, shards: list[ShardPrompts], prompts: Stage, responses: Stage
) -> None:
    """Write the manifest: the shards and everything that they depend on."""
    target = locate_target(recipe.target.path, recipe.target.revision)
    about = {
        "taps": features.inputs["taps"],
        "dtype": recipe.data.dtype,
        "target": {"path": recipe.target.path, "revision": recipe.target.revision, "sha256": target_identity(target)},
        "mask_rule": f"{recipe.data.turns} turns of the assistant" if recipe.data.responses == "given" else "response",
        "written_by": responses.facts().get("written_by"),
        "temperatures": recipe.data.temperatures if recipe.data.responses == "target" else None,
        "prompts_sha256": prompts.facts().get("sha256"),
        "chat_template_sha256": prompts.facts().get("chat_template"),
        "made_from": features.inputs,
    }
    write_manifest(features.folder, [shard.features_file for shard in shards], about)
    features.finish({"manifest": file_digest(features.folder / MANIFEST)})


def main() -> None:
    run_command(__doc__, run, CONTINUES)


if __name__ == "__main__":
    main()
