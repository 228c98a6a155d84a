"""From prompts to features: the target answers each prompt, then one pass over its text taps its hidden states.

    accelerate launch -m data_pipelines.harvest recipes/tiny.yaml

Both stages write whole shards by sample id, so a killed run resumes and the number of ranks may change in between.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from accelerate import PartialState

from data_pipelines.cost_estimate import Plan, first_batch, foreseen, timed
from data_pipelines.features import Ask, tap, write_features
from data_pipelines.prompts import make_prompts
from data_pipelines.responses import (
    Text,
    Writer,
    count_written,
    finish_responses,
    responses_path,
    responses_stage,
    server_writer,
    speculative_writer,
    target_writer,
    write_given,
    write_responses,
)
from data_pipelines.shard_work import begin, idle_cores, metered, pieces, start_processes
from data_pipelines.shards import (
    MANIFEST,
    read_manifest,
    shard_name,
    stored_taps,
    write_manifest,
)
from data_pipelines.stage import Stage, file_digest, target_identity
from data_pipelines.store import adopt
from data_pipelines.token_counts import shards_identity, write_counts
from heads.checkpoint import head_taps
from heads.frozen import FrozenTarget
from heads.target_config import TargetConfig, locate_target
from inference.target.model import TargetModel
from inference.target.ranks import Ranks
from recipes import Recipe, run_command
from recipes.jsonl import read_jsonl

STORE_FORMAT = 3  # of the shards and what the manifest says of them
LOGITS_TOLERANCE = 0.05  # of the largest logit; bfloat16 rounding stays well below


def taps_to_store(recipe: Recipe, config: TargetConfig) -> tuple[int, ...]:
    """Those of the head; or all that a store holds which was made, or begun, for more: it is taken as it is."""
    taps = stored_taps(head_taps(recipe.head, config), config.num_layers)
    found = Stage("features", recipe.features_dir, {}).claimed_for()
    return tuple(found["taps"]) if found is not None and set(taps) <= set(found["taps"]) else taps


def features_stage(recipe: Recipe, responses: Stage, taps: tuple[int, ...]) -> Stage:
    inputs = {"responses": responses.digest(), "taps": taps, "data.dtype": recipe.data.dtype, "format": STORE_FORMAT}
    return Stage("features", recipe.features_dir, inputs)


def harvest(recipe: Recipe) -> Stage:
    """Run whatever is missing of prompts, responses and features, on all ranks together; returns the last stage.

    With data.mode online that is the responses, with data.store the features that lie there. Raises ValueError where a
    stage on disk was made from other inputs.
    """
    state = PartialState()
    if state.is_main_process and (idle := idle_cores(state)):
        print(idle)
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    with state.main_process_first():
        prompts = make_prompts(recipe)
    config = TargetConfig.from_folder(locate_target(recipe.target.path, recipe.target.revision))
    check_lengths(recipe, config)
    if recipe.data.store is not None:
        return adopt(recipe, recipe.data.store, stored_taps(head_taps(recipe.head, config), config.num_layers))

    taps = taps_to_store(recipe, config)
    load = cache(partial(TargetModel.load, recipe.target, taps))  # once, where it is needed at all
    responses = responses_stage(recipe, prompts)
    if not responses.is_complete():
        if recipe.data.mode == "offline":
            expected = foreseen(recipe, config, taps, pieces(recipe))
            if state.is_main_process:
                print(expected)
        begin(responses, state)
        make_responses(recipe, load, state)
        state.wait_for_everyone()
        if state.is_main_process:
            finish_responses(recipe, responses)
        state.wait_for_everyone()

    if recipe.data.mode == "online":
        return responses
    features = features_stage(recipe, responses, taps)
    if not features.is_complete():
        begin(features, state)
        make_features(recipe, load(), features, state)
        state.wait_for_everyone()
        if state.is_main_process:
            finish_features(recipe, features, prompts, responses)
        state.wait_for_everyone()
    return features


def make_responses(recipe: Recipe, load: Callable[[], TargetModel], state: PartialState) -> None:
    """This rank's share of the responses, by whatever the recipe has them written."""
    data, ranks = recipe.data, Ranks()
    if data.responses == "given":
        for piece in ranks.share(pieces(recipe)):
            write_given(recipe, piece)
        return
    if data.server is not None:
        writer = server_writer(recipe, data.server)
    elif data.draft_head is not None:
        writer, ranks = speculative_writer(recipe, data.draft_head)
    else:
        writer, ranks = target_writer(recipe, load()), load().ranks

    def work(write: Writer) -> None:
        share = ranks.share(pieces(recipe))
        with metered(share, state, "responses of the target") as meter:
            for piece in share:
                write_responses(recipe, write, piece, meter)

    ranks.carry_out(writer, work)


def make_features(recipe: Recipe, target: TargetModel, features: Stage, state: PartialState) -> None:
    """This rank's share of the features; raises ValueError where the disk cannot hold those of all ranks."""
    check_teacher(recipe, target)
    everything = pieces(recipe)
    plan = Plan.of(recipe, target.config, target.taps, everything)
    plan.check_disk(features.folder)
    made_from, share = features.identity(), target.ranks.share(everything)

    def work(ask: Ask) -> None:
        if state.is_main_process:
            batch = first_batch(recipe, everything[0])
            # Looking at a number waits for the device.
            seconds = timed(lambda: ask(batch).last_hidden.sum().item()) / sum(map(len, batch))
            print(plan.in_words(seconds / target.ranks.num_workers))
        with metered(share, state, "features") as meter:
            write_features(recipe, target.taps, ask, target.device, share, made_from, meter)

    target.ranks.carry_out(partial(tap, target), work)


def finish_features(recipe: Recipe, features: Stage, prompts: Stage, responses: Stage) -> None:
    """Write the manifest: which shards there are, and all that their content depends on."""
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
    names = [shard_name(piece.split, piece.index) for piece in pieces(recipe)]
    write_manifest(features.folder, names, about)
    vocab_size, shards = TargetConfig.from_folder(target).vocab_size, read_manifest(features.folder)["shards"]
    counted = {}
    for split in ("train", "heldout"):
        parts = [piece for piece in pieces(recipe) if piece.split == split]
        texts = [Text.from_row(row) for piece in parts for row in read_jsonl(responses_path(recipe, piece))]
        identity = shards_identity([shard for shard in shards if shard["file"].startswith(f"{split}-")])
        counted[identity] = count_written(texts, vocab_size)
    write_counts(features.folder, counted)
    features.finish({"manifest": file_digest(features.folder / MANIFEST)})


def check_lengths(recipe: Recipe, config: TargetConfig) -> None:
    longest = recipe.data.prompt_tokens + recipe.data.response_tokens
    if longest > config.max_positions:
        raise ValueError(
            f"data.prompt_tokens {recipe.data.prompt_tokens} and data.response_tokens {recipe.data.response_tokens} "
            f"make samples of {longest} tokens, the target has {config.max_positions} positions; lower one of them"
        )


def check_teacher(recipe: Recipe, target: TargetModel) -> None:
    """Training reads the teacher's logits off the stored last hidden state; refuse a target where that is not so."""
    prompt = next(read_jsonl(recipe.prompts_dir / "train.jsonl"))["tokens"]
    output = target.forward(torch.tensor([prompt], device=target.device), last_only=True)
    folder = locate_target(recipe.target.path, recipe.target.revision)
    frozen = FrozenTarget.from_folder(folder, target.dtype, target.device)
    own, rebuilt = output.logits[0, -1].float(), frozen.logits(output.last_hidden[0, -1])
    error = float((own - rebuilt).abs().max() / own.abs().max())
    if error > LOGITS_TOLERANCE:
        raise ValueError(
            f"target.path: the logits of {recipe.target.path} are not its lm_head over its final norm (they differ by "
            f"{error:.1%}): a {target.config.model_type!r} model scales or shifts them in a way not known here"
        )


def main() -> None:
    start_processes()
    run_command(__doc__, lambda recipe: print(recipe.features_dir, harvest(recipe).facts()))


if __name__ == "__main__":
    main()
