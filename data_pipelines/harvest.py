"""From prompts to features: the target answers each prompt, then one forward over each text taps its hidden states.

    accelerate launch -m headstart.data_pipelines.harvest recipes/tiny.yaml
    headstart harvest recipes/tiny.yaml --part 3/64     # in each of 64 jobs, which share run_dir and nothing else
    headstart harvest recipes/tiny.yaml --on ray    # on the workers of a Ray cluster

Both stages write whole shards by sample id, so a killed run can resume, with a different number of ranks, parts or
workers if you like. SIGTERM, or Ctrl-C once, lets a part finish its running texts or shard; it then exits.
"""

from headstart.recipes.command_line import Share, harvest_arguments

if __name__ == "__main__":
    harvest_arguments(__doc__)  # --help and mistakes end the process here, before torch is loaded

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from accelerate import PartialState

from headstart.common.errors import CONTINUES
from headstart.common.process import Interrupts, end_with_launcher
from headstart.common.remote import shown
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.harvest_stages import Harvest, OneTarget, harvest_of
from headstart.data_pipelines.preflight import check_harvest
from headstart.data_pipelines.stages.shard_work import (
    entrance,
    forget_parts,
    idle_cores,
    locks_of,
    parts_at_work,
    refuse_other_code,
    refuse_parts_at_work,
    start_processes,
)
from headstart.data_pipelines.stages.stage import Stage
from headstart.data_pipelines.together import hold_folder, on_all_ranks, refuse_differences, run_together
from headstart.heads.target_config import TargetOrigin, folder_of
from headstart.inference.targets.loading import slow_format
from headstart.recipes import Recipe, run_command


def run(recipe: Recipe, part: Share | None = None, on: str | None = None) -> None:
    """The command: harvest on all ranks of the launch, one part in this process, or on a cluster."""
    end_with_launcher()
    state = start_processes()
    if part is not None:
        return harvest_part(recipe, part, state)
    if on == "ray":
        if find_spec("ray") is None:
            missing = "--on: ray given, which is not installed"
            raise ValueError(f"{missing}; run pip install -e '.[ray]', or leave --on out")
        from headstart.data_pipelines.on_ray import harvest_on_ray  # it needs Ray

        refuse_for_parts(recipe, "--on ray", state)
        if recipe.data.draft_head is not None:
            given = f"data.draft_head: {recipe.data.draft_head} given, for which each worker would need two targets"
            raise ValueError(f"{given}; leave it out (null), or harvest in parts (--part)")
        check_harvest(recipe, is_here=False)
        return print(f"complete in {shown(harvest_on_ray(recipe, state).folder)}")
    with run_together(recipe, "harvest", partial(check_harvest, recipe)):
        print(f"complete in {shown(harvest(recipe).folder)}")


def harvest(recipe: Recipe) -> Stage:
    """Run the missing stages of prompts, responses and features, on all ranks together; returns the last stage."""
    with open_harvest(recipe) as stages:
        prompts = stages.prompts()
        responses = stages.responses(prompts)
        return stages.features(prompts, responses)


def harvest_part(recipe: Recipe, part: Share, state: PartialState) -> None:
    """Make one part of the shards in this process; the last part to finish writes the manifest.

    Raises SystemExit with a shell's exit code if SIGTERM or Ctrl-C arrives, after the running texts, or the shard.
    """
    refuse_for_parts(recipe, f"--part {part}", state)
    check_harvest(recipe)
    folder, command, interrupts = recipe.data_folder, f"harvest --part {part}", Interrupts()
    with ExitStack() as own, harvest_of(recipe, state, lambda: interrupts.received is not None) as stages:
        with entrance(folder, command):
            refuse_parts_at_work(folder, allowed_suffix=part.lock.removeprefix(str(part.number)))
            own.enter_context(only_run_in(locks_of(folder) / part.lock, command))
            refuse_other_code(folder)
            prompts = stages.begin()
        with interrupts:
            stages.make(part.share(stages.shards))
        if interrupts.received is not None:
            print(
                f"{interrupts.number.name}: finished texts and shards are saved; the same command continues", flush=True
            )
            raise SystemExit(128 + interrupts.number)
        with entrance(folder, command, wait=True):  # a command that finds this part at work holds the folder so long
            own.close()
            others = parts_at_work(folder)
            done = None if others else stages.finish(prompts)
            if done is not None:
                forget_parts(folder)
    if done is not None:
        print(f"complete in {shown(done.folder)}")
    else:
        print(f"part {part} is made; the last part to finish writes the manifest, or the command without --part does")


def refuse_for_parts(recipe: Recipe, option: str, state: PartialState) -> None:
    """Raise ValueError if independent processes, which `option` asks for, cannot make the harvest."""
    if recipe.data.store is not None:
        raise ValueError(f"data.store: {recipe.data.store} given, so there is nothing to harvest; leave {option} out")
    if state.num_processes > 1:
        advice = f"start one process for each part, or leave {option} out"
        raise ValueError(f"{option}: {state.num_processes} ranks launched, a single process is allowed; {advice}")
    if recipe.target.split == "tensor":
        allowed = "null or layers is allowed, as a target split by tensor needs the ranks of a launch"
        raise ValueError(f"target.split: tensor given with {option}, {allowed}; choose one, or leave {option} out")


@contextmanager
def open_harvest(recipe: Recipe, target: OneTarget | None = None) -> Iterator["Harvest"]:
    """Hold the folder of the data for ranks that agree on its target, which training may share."""
    state = PartialState()
    if state.is_main_process:
        for hint in filter(None, (idle_cores(state), slow_format("target.dtype", recipe.target.dtype, state.device))):
            print(hint)
    with ExitStack() as stack:
        shared = recipe.data.folder
        if shared is not None and shared.resolve() != recipe.run_dir.resolve():  # another recipe may fill it already
            stack.enter_context(hold_folder(state, "data.folder", shared, "harvest", wait=True))
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        on_all_ranks(lambda: refuse_parts_at_work(recipe.data_folder) if state.is_main_process else None)
        if state.is_main_process:
            forget_parts(recipe.data_folder)  # continue from their results
        weights = replace(TargetOrigin.of(folder_of(recipe.target)), source=None)  # model cards may differ
        refuse_differences(state, {"config and weights of target.path": str(weights)})
        yield stack.enter_context(harvest_of(recipe, state, shared=target))


if __name__ == "__main__":
    run_command(__doc__, run, CONTINUES, harvest_arguments)
