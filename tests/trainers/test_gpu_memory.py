"""Laws of the memory estimate: the recipes fit their GPUs, and a run that does not fit names what makes it fit."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs import Says, Typed, assert_raises, assert_refused, assert_told
from saved_tensors import SavedForBackward, storage_of
from tiny_run import build_run, write_config
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from headstart.data_pipelines.features.batches import Sample, TrainingBatch
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import draft_vocab, head_taps, new_head
from headstart.heads.target_config import TargetConfig
from headstart.inference.targets.loading import model_without_weights
from headstart.recipes import Recipe, load_recipe
from headstart.recipes.command_line import DeviceMemory
from headstart.recipes.schema import TargetSection
from headstart.trainers.memory import Machine, RunMemory, activation_bytes
from headstart.trainers.objectives.unrolled import Teacher
from headstart.trainers.plan import TokenCost, time_rows
from headstart.trainers.step import autocast, head_in_training

FIXED = ["train.accumulate=1", "train.activation_checkpointing=false"]  # which the plan would choose
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GPU_RECIPES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not re.match("tiny|smollm", path.stem))
LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
TARGETS: dict[str, Any] = {
    "llama3_8b": LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336),
    "llama3_70b": LlamaConfig(
        **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
    ),
    "qwen3_8b": Qwen3Config(
        vocab_size=151936, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8, head_dim=128
    ),
    "qwen3_vl_4b": AutoConfig.for_model("qwen3_vl", text_config={"num_hidden_layers": 36}),
    "qwen3_5_35b": AutoConfig.for_model("qwen3_5_moe"),
    "glm4_7_flash": AutoConfig.for_model("glm4_moe_lite"),
    "gpt_oss_20b": AutoConfig.for_model("gpt_oss", num_hidden_layers=24, num_local_experts=32),
    "gemma4_e2b": AutoConfig.for_model("gemma4"),
}


@pytest.fixture(scope="module")
def gpu_recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """gpu_recipe(name, *overrides): a recipe of the repository whose target is a folder with its config.json only."""
    folder = tmp_path_factory.mktemp("targets")
    for name, config in TARGETS.items():
        config.save_pretrained(folder / name)

    def load(name: str, *overrides: str) -> Recipe:
        [target] = [each for each in TARGETS if name.startswith(each)]
        own = f"target.path={folder / target}", f"run_dir={folder}"
        return load_recipe(RECIPES / f"{name}.yaml", [*own, *overrides])

    return load


@pytest.fixture(autouse=True, scope="module")
def _build_each_target_once() -> Iterator[None]:
    built = cache(lambda path, dtype: model_without_weights(TargetSection(path=path, dtype=dtype)))
    with pytest.MonkeyPatch.context() as patch:
        build = "headstart.trainers.memory.model_without_weights"
        patch.setattr(build, lambda section: built(section.path, section.dtype))
        yield


def run_on(recipe: Recipe, machine: str | Machine) -> RunMemory:
    if isinstance(machine, str):
        machine = Machine.described(recipe, DeviceMemory.parse(machine))
    return RunMemory.of(recipe, TargetConfig.from_folder(Path(recipe.target.path)), machine)


def check(recipe: Recipe, machine: str | Machine) -> None:
    run_on(recipe, machine).refuse()


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["80GB", "8x80GB"])
@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_gpu_recipe_fits_the_gpus_that_it_names(gpu_recipe, name, devices):
    recipe = gpu_recipe(name)
    assert recipe.train.precision == "bfloat16"
    if "_70b" in name and devices == "80GB":
        assert_raises(lambda: check(recipe, devices), "target.split: | start 2 ranks or more with target.split=tensor")
        check(gpu_recipe(name, f"data.store={RECIPES}"), devices)
    else:
        check(recipe, devices)


@pytest.mark.parametrize(
    ("name", "devices", "overrides"),
    [
        ("llama3_8b", "80GB", ["train.precision=float32", *FIXED]),
        ("llama3_8b", "24GB", []),
        ("qwen3_8b_block", "40GB", FIXED),
        ("llama3_70b", "8x80GB", ["train.eval_prompts=8", "target.split=layers", "train.batch_size=64", *FIXED]),
    ],
)
def test_the_settings_named_by_a_refusal_make_the_run_fit(gpu_recipe, name, devices, overrides):
    with pytest.raises(ValueError, match=r"train\.accumulate: \d+ given, .* allowed there; write train\.") as refusal:
        check(gpu_recipe(name, *overrides), devices)
    named = str(refusal.value).partition("; write ")[2].split()
    check(gpu_recipe(name, *overrides, *named), devices)


@pytest.mark.parametrize(("devices", "micro_batches"), [("48GB", 6), ("80GB", 2), ("8x80GB", 1)])
def test_one_target_harvests_decodes_and_teaches_on_the_card(gpu_recipe, devices, micro_batches):
    """It was counted, and loaded, twice: 86.0 of 80 GB with data.online."""
    recipe = gpu_recipe("llama3_8b", "data.online=[auto]")
    run = run_on(recipe, devices).fitted()
    assert run.total <= run.machine.memory
    assert [need.size for need in run.needs if need.what == "the target"] == [run.weights()]
    section = run.recipe.train
    assert (section.micro_batches, bool(section.activation_checkpointing)) == (micro_batches, False)
    given = recipe.model_copy(update={"train": recipe.train.model_copy(update={"accumulate": 16})})
    assert run_on(given, devices).fitted().recipe.train.accumulate == 16


def test_what_no_setting_can_make_fit_says_so_and_slices_of_a_head_need_less_than_the_whole(gpu_recipe):
    with pytest.raises(ValueError, match=r"target\.split: null given, .* on each device .*; start 2 ranks or more"):
        check(gpu_recipe("llama3_8b"), "16GB")
    with pytest.raises(ValueError, match="take larger devices or a smaller head"):
        check(gpu_recipe("llama3_8b", f"data.store={RECIPES}"), "10GB")
    recipe = gpu_recipe("llama3_70b", *FIXED)
    with pytest.raises(ValueError, match=r"train\.accumulate"):
        check(recipe, Machine(8, torch.device("cuda"), 55 * 10**9, 8))
    check(recipe, Machine(8, torch.device("cuda"), 55 * 10**9, 8, slices=8))


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_run(tmp_path_factory.mktemp("middling")).parent
    sizes = {"hidden_size": 128, "intermediate_size": 448, "head_dim": 32, "vocab_size": 512}
    write_config(folder / "target", **sizes, max_position_embeddings=1024)
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("  unroll: 3\n", ""))
    return folder


@pytest.mark.each_value
@pytest.mark.parametrize("options", [(), ("train.precision=bfloat16",), ("train.activation_checkpointing=true",)])
@pytest.mark.parametrize(
    "head",
    [
        "{kind: eagle3, draft_vocab_size: 256}",
        "{kind: eagle1}",
        "{kind: medusa, draft_vocab_size: 256}",
        "{kind: block, num_layers: 3, mask_token_id: 3, markov_rank: 16}",
    ],
)
def test_planned_activations_are_about_what_a_backward_pass_keeps(middling, head, options):
    """Block heads were planned at 40 % of what they take, and half precision without its float32 sums."""
    rows, longest = 2, 256
    anchors = ["train.anchors=64"] * ("block" in head)
    recipe = load_recipe(middling / "recipe.yaml", [f"head={head}", *anchors, *options])
    config = TargetConfig.from_folder(middling / "target")
    size, vocab_size = config.hidden_size, config.vocab_size
    frozen = FrozenTarget(config, torch.randn(vocab_size, size), torch.ones(size), None, torch.randn(vocab_size, size))
    vocab = draft_vocab(recipe.head, torch.arange(vocab_size))
    teacher = Teacher(frozen, vocab, getattr(torch, recipe.train.precision))
    unrolled = head_in_training(recipe, new_head(recipe.head, frozen, vocab, seed=0), teacher)
    tapped = sum(tap < config.num_layers for tap in head_taps(recipe.head, config)) * size
    states = torch.randn(longest, tapped), torch.randn(longest, size)
    sample = Sample(torch.randint(vocab_size, (longest,)), torch.ones(longest, dtype=torch.bool), *states)
    batch = TrainingBatch.collate([sample] * rows, torch.float32)
    known: set[Any] = {storage_of(each) for each in (*unrolled.parameters(), *unrolled.buffers())}
    with autocast(recipe.train, torch.device("cpu")), SavedForBackward(known) as saved:
        supervision = unrolled.supervise(batch, "key")
        unrolled(batch, supervision, supervision.counts(unrolled.objective.unroll))
    planned = activation_bytes(recipe, unrolled.head, rows, longest, torch.device("cpu"))
    assert 0.9 * saved.num_bytes < planned
    if not recipe.train.activation_checkpointing and "medusa" not in head:  # there other parts are larger
        assert planned < 1.3 * saved.num_bytes


def test_a_plan_for_devices_that_are_not_here(middling: Path, typed: Typed) -> None:
    command = ["train", middling / "recipe.yaml", "train.batch_size=8", "head.draft_vocab_size=256"]
    assert_told(typed(*command, "train.dry_run=true", "--device-memory", "8x2GB"), "ranks: 8 | of 2.0 GB")


def test_a_run_that_does_not_fit_its_gpu_is_refused_before_the_harvest(middling, monkeypatch, typed):
    small = Machine(1, torch.device("cuda"), 40 * 10**6)
    monkeypatch.setattr(Machine, "running", lambda *_: small)
    monkeypatch.setattr("headstart.data_pipelines.harvest.open_harvest", None)
    command = ["train", middling / "recipe.yaml", "head.draft_vocab_size=256", "data.response_tokens=512", *FIXED]
    says = Says("train.accumulate", "1 given", "up to 40.0 MB is allowed", "write train.")
    assert_refused(typed(*command), says)
    outcome = typed(*command, "train.dry_run=true")
    assert_refused(outcome, says)
    assert "memory: activations, about" in outcome.out
    assert not (middling / "run").exists()


def cost_of(recipe: Recipe) -> TokenCost:
    return TokenCost.of(recipe, run_on(recipe, "80GB").head)


def test_the_planned_speeds_are_those_that_an_h100_showed(gpu_recipe: Callable[..., Recipe]) -> None:
    """docs/gpu.md: plain decoding of one row and of 64, hidden states, and a training step of 8 x 2,048 tokens."""
    cost = cost_of(gpu_recipe("llama3_8b"))
    assert 1 / cost.responses(1, 1, 600) == pytest.approx(118.3, rel=0.05)
    assert 1 / cost.responses(1, 64, 400) == pytest.approx(4255, rel=0.05)
    assert 1 / cost.features(1) == pytest.approx(41_529, rel=0.05)
    assert cost.steps(8 * 2048) == pytest.approx(0.483, rel=0.05)
    cost = cost_of(gpu_recipe("qwen3_5_35b"))  # a token meets only the experts that are chosen for it
    assert 2e9 < cost.forward / 2 < 3e9 < 34e9 < cost.weights / 2 < 36e9  # 35B-A3B, embedding included


def planned_hours(recipe: Recipe, count: int) -> dict[str, float]:
    rows = time_rows(run_on(recipe, f"{count}x80GB"))
    return {what: float(hours.rstrip(" h").replace(",", "")) for what, hours, _ in rows}


def test_the_plan_has_the_hours_of_each_stage(gpu_recipe: Callable[..., Recipe]) -> None:
    few, many = (planned_hours(gpu_recipe("llama3_8b"), count) for count in (1, 8))
    assert set(few) == {"time: responses", "time: features", "time: training", "time of GPUs, in all"}
    for stage in ("time: responses", "time: features", "time: training"):
        assert few[stage] == pytest.approx(8 * many[stage], abs=0.05)
    assert few["time of GPUs, in all"] == pytest.approx(many["time of GPUs, in all"])
    online = planned_hours(gpu_recipe("llama3_8b", "data.online=[auto]"), 1)
    assert "time: features" not in online
    assert online["time: training"] > few["time: training"] + few["time: features"]
    layers = planned_hours(gpu_recipe("llama3_8b", "target.split=layers"), 8)  # each GPU has some, and they take turns
    for stage in ("time: responses", "time: features"):
        assert layers[stage] == pytest.approx(few[stage], abs=0.02)
