"""How each documented command is walked in a clone whose recipes are tiny, or the reason why it is not."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from documented_commands import Documented

# The sizes of every recipe in the clone; an override in a command gets the same value.
SIZES: dict[str, Any] = {
    "data.num_prompts": 12, "data.prompt_tokens": 32, "data.response_tokens": 12, "data.generate_batch": 12,
    "data.harvest_batch": 4, "data.heldout_samples": 4, "data.shard_samples": 6, "train.steps": 4,
    "train.batch_size": 4, "train.accumulate": 1, "train.warmup_steps": 1, "train.checkpoint_every": 2,
    "train.eval_prompts": 1, "joint.warmup_steps": 1, "decode.max_new_tokens": 12, "report.num_prompts": 2,
}  # fmt: skip
# Large models are replaced by the demo target, and heads get sizes that fit it.
TINY_TARGET: dict[str, Any] = {
    "target.path": "assets/demo_target",
    "target.dtype": "float32",
    "data.prompts": "data/prompts.jsonl",  # the demo target is no chat model, which could write them itself
    "data.heldout_prompts": "data/heldout_prompts.jsonl",
    "data.self_system_prompts": None,
    "data.self_pictures": None,
    **{"head.hidden_size": 64, "head.intermediate_size": 96, "head.num_heads": 4, "head.num_kv_heads": 2},
    **{"head.draft_vocab_size": 512, "head.taps": [2, 8, 13], "head.lm_head_rank": 8, "head.mask_token_id": 1023},
}
# Placeholders of the documents for a path or number of the user's own.
STAND_INS = {
    r"\bRECIPE\b": "recipes/tiny.yaml",
    r"/shared/runs/one --(part|engine)": r"runs/\1 --\1",
    r" \[EXPORT\]": " runs/tiny/export/vllm",
    r"\bTYPE\b": "llama",
    r"\bHEAD TARGET\b": "runs/tiny/head assets/demo_target",
    r"\bEXPORT\b": "runs/tiny/export/vllm",
    r"\bTARGET\b|meta-llama/\S+": "assets/demo_target",
    r"\bPATH\b|path/to/head": "runs/tiny/export/vllm",
    r"\bOUT\b": "runs/converted",
    r"runs/medusa/head": "runs/tiny_medusa/head",
    r"--num_processes 8": "--num_processes 2",
    r"--device-memory 8x80GB": "--device-memory 2x80GB",
}
# Made before the walk, in addition to data/prompts.jsonl and data/heldout_prompts.jsonl.
PREPARED = ("headstart harvest recipes/tiny.yaml run_dir=runs/more seed=1",)  # a second store, to be merged

SMOLLM2 = "models/SmolLM2-135M-Instruct"  # which the walk fetches
BY_HAND = {
    r"^hf upload ": "uploads to a hub repository",
    r"VENV|--peer": "needs a peer's environment; run when a peer's version changes",
    r"^make bench$": "hours; the scripts that it runs are walked one by one",
    r"^make check-(vllm|clients)$": "downloads vLLM or the clients; run in addition to the walk before a release",
    r"^make (bench|check)-llamacpp|export\.format=gguf|benchmarks/llamacpp": "compiles llama.cpp; run before a release",
    r"data\.prompts=runs/smollm2_tokens": "reads tokens of SmolLM2, which the demo target does not have",
    r"data\.states=vllm": "needs servers of vLLM; check-vllm harvests with one",
    r"=s3://": "needs a bucket; see tests/data/test_object_stores.py",
    r"^aiperf ": "needs a running server; check-clients runs it",
    **({} if shutil.which("chromium") else {r"^make check-page$": "needs a Chromium"}),
    r"tests/interop/\w+\.py": "run by a make target: check-vllm, check-speculators, check-clients, check-page",
    r"self_pictures=": "needs pictures and a target that reads them; see tests/data/test_self_pictures.py",
    r"^make walk$": "is this walk",
    r"^make check-targets$|target_families\.py( --(bits|write|list \w+))?$": "half an hour; run for a new transformers",
    r"^headstart targets (NAME|Qwen/|path/)": "names a user's own model; see tests/inference/targets/test_targets.py",
    r"^pip install timm$": "what transformers says of some model types, which are not tried",
    r" PYTHON=python3\.12$": "needs another Python; run when a lower bound changes",
    r"benchmarks/soak\.py": "half an hour of load; run when its figures are renewed",
    r"=runs/self/head\b": "trains a head of SmolLM2 first, for hours",
    r"benchmarks/serve\.py|^from openai import": "needs a running server",
    r"^headstart adapt\b": "needs a server that has answered requests; see tests/trainers/test_adapt.py",
    r"'\.\[trl\]'|examples/grpo\.py|^from headstart\.trl": "takes minutes; see tests/trainers/test_trl.py",
    r"^import headstart\n": "needs a user's policy; see tests/trainers/test_refresh.py",
    r"^make chat$|^headstart serve\b": "serve until they are stopped; see tests/inference/serve/test_server_command.py",
    r"--machine_rank|--num_machines [2-9]|^torchrun |^srun |^sbatch ": "see tests/trainers/test_machines.py",
}
# The order of the walk: the environment first, then data-flow order. A command belongs to the first pattern it matches.
ORDER = (
    r"^python3? -m venv ",
    r"^pip install -c constraints\.txt -e (\.|'\.\[serve\]')$",
    r"^headstart --(help|version)|^headstart \w+ --help",
    r"^from ",
    r"^headstart targets",
    r"train\.dry_run=true",
    r"^make (\.venv|help)$",
    r"^headstart prompts ",
    r"^headstart harvest |-m headstart\.data_pipelines\.harvest ",
    r"^headstart inspect ",
    r"^(make|headstart) smollm2",
    r"^make demo$",
    r"trainers/eagle\.py recipes/tiny\w*\.yaml$",  # their harvests serve Medusa heads too, but not the reverse
    r"^accelerate launch trainers/\w+\.py |^headstart train |launch/one\.yaml ",
    r"launch/(ddp|fsdp2)\.yaml ",
    r"^headstart calibrate ",
    r"^headstart report ",
    r"^make chat-cli$|^headstart chat\b",
    r"^headstart export ",
    r"^headstart lint ",
    r"^headstart convert ",
    r"^headstart doctor ",
    r"^headstart store (verify|merge) ",
    r"^make drafters$",
    r"^(PYTHONPATH=tests/support )?python (benchmarks|examples)/\w+\.py",
    r"^pip install -e '\.\[\w+\]'$",
    r"^make test-all$",
    r"launch/zero[23]\.yaml ",
    r"^make (lint|test|docs)$",
    r"^make check-page$",
    r"^make check-kernels$",
    r"^make check-speculators$",
    r"^make clean$",
)
OUTPUTS = {r"\bconvert ": ("runs/imported", "runs/converted"), r"\bstore merge ": ("runs/all",)}
LAUNCH_OF_TINY = re.compile(r"--config_file (?:recipes/launch/)?(\w+).* recipes/tiny\.yaml$")
SLICED = ("fsdp2", "zero2", "zero3")
TRAINS = re.compile(r"trainers/\w+\.py |^headstart (launch .* )?train |^make demo$")


@dataclass
class Walked:
    """One command of the walk, and the documented ones that it stands for."""

    command: str
    place: str  # the first place where it is documented
    rank: int  # its position in ORDER
    reason: str = ""  # why it is not run here


def plan(documented: list[Documented]) -> list[Walked]:
    """Every documented command in walking order, equal ones once; raises ValueError naming those of no rule."""
    found: dict[str, Walked] = {}
    uncovered = []
    for each in documented:
        reason = next((reason for pattern, reason in BY_HAND.items() if re.search(pattern, each.command)), "")
        command = each.command if reason else tiny(each.command)
        rank = next((rank for rank, pattern in enumerate(ORDER) if re.search(pattern, command)), None)
        if not reason and rank is None:
            uncovered.append(f"{each.place}: {each.command}")
        found.setdefault(command, Walked(command, each.place, len(ORDER) if rank is None else rank, reason))
    if uncovered:
        raise ValueError(
            "documented, but not in ORDER or BY_HAND of tests/interop/walk_plan.py; add a pattern: "
            + "; ".join(uncovered)
        )
    return sorted(found.values(), key=lambda walked: (bool(walked.reason), walked.rank))


def tiny(command: str) -> str:
    """The command with the user's own paths and numbers filled in, and with tiny sizes."""
    for pattern, stand_in in STAND_INS.items():
        command = re.sub(pattern, stand_in, command)
    for field, value in SIZES.items():
        command = re.sub(rf"(?<=\s){re.escape(field)}=\S+", f"{field}={value}", command)
    if (launch := LAUNCH_OF_TINY.search(command)) is not None:
        command += f" run_dir=runs/{launch[1]} data.folder=runs/tiny"  # or it would find the head of the run before
        command += " train.optimizer=adamw" * (launch[1] in SLICED)  # muon, the recipe's, needs whole matrices
    if "recipes/smollm2" in command and "=assets/smollm2_head" in command:
        command += f" target.path={SMOLLM2}"  # the recipe has the demo target, whose heads have other sizes
    return command


def outputs(command: str, clone: Path) -> list[Path]:
    """The outputs that a command refuses to overwrite or would reuse; they are removed before it runs."""
    for pattern, folders in OUTPUTS.items():
        if re.search(pattern, command):
            return [path for folder in folders for path in clone.glob(folder)]
    if re.search(r"\bexport ", command):
        return [run_dir(command, clone) / "export"]
    if TRAINS.search(command):
        return [run_dir(command, clone) / folder for folder in ("checkpoints", "head", "target", "metrics.jsonl")]
    return []


def shrink_recipe(path: Path) -> None:
    """Give a recipe tiny sizes and, if it names a large model, the demo target."""
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    large = not str(recipe["target"]["path"]).startswith("assets/")
    for field, value in {**SIZES, **(TINY_TARGET if large else {})}.items():
        section, _, key = field.partition(".")
        own = recipe.get(section, {}).get(key)
        if section in recipe and own != 0 and (field in SIZES or own is not None):  # 0 does without
            recipe[section][key] = value
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))


def run_dir(command: str, clone: Path) -> Path:
    """The run_dir of a command that trains."""
    if (given := re.search(r"run_dir=(\S+)", command)) is not None:
        return clone / given[1]
    recipe = re.search(r"recipes/\w+\.yaml", command)
    text = (clone / (recipe[0] if recipe else "recipes/tiny.yaml")).read_text()
    return clone / str(yaml.safe_load(text)["run_dir"])
