"""Do clients of OpenAI's API work with the server as they are shipped, with their defaults?

    make check-clients
    python tests/interop/check_clients.py --target models/SmolLM2-135M-Instruct [NAME ...]

Each client gets an environment of its own below .venv-clients, so that one that cannot be installed is named and stands
in nobody's way. Serves the target, lets each client use it, and prints a table. Exit code 1 if anything fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
FOLDER = ROOT / ".venv-clients"
LONGEST = 900  # seconds that a client may take
# No prices are fetched, and no statistics sent.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Server:
    url: str  # without /v1
    model: str
    target: Path


@dataclass(frozen=True)
class Client:
    """Packages, and the commands that use them: programs of the client's environment, after what they try."""

    packages: tuple[str, ...]
    commands: Callable[[Server], dict[str, list[str]]] | None = None  # None: use_clients.py
    is_node: bool = False


def lm_eval(server: Server) -> dict[str, list[str]]:
    """A generation task and one of multiple choice, with data of their own, as no hub can be asked."""
    work = FOLDER / "tasks"
    work.mkdir(exist_ok=True)
    rows = [{"question": f"{one} + {one} =", "choices": [str(2 * one), "7"], "answer": 0} for one in (1, 2, 4)]
    (work / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(work / "sums.jsonl")}}
    shared: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    shared |= {"doc_to_text": "{{question}}", "metadata": {"version": 1}}
    choice: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    stops = {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}
    written: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}", **stops}
    for name, own in {"sums_choice": choice, "sums_written": written}.items():
        (work / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **own}))  # JSON is YAML
    run = ["lm-eval", "run", "--include_path", str(work), "--tasks"]
    arguments = f"model={server.model},base_url={server.url}/v1"
    plain = ["--model", "local-completions", "--model_args", f"{arguments}/completions,tokenizer={server.target}"]
    chat = ["--model", "local-chat-completions", "--model_args", f"{arguments}/chat/completions"]
    return {
        "local-completions, generation": [*run, "sums_written", *plain],
        "local-completions, multiple choice": [*run, "sums_choice", *plain],
        "local-chat-completions, generation": [*run, "sums_written", *chat, "--apply_chat_template"],
    }


def aiperf(server: Server) -> dict[str, list[str]]:
    sizes = ["--prompt-input-tokens-mean", "24", "--prompt-output-tokens-mean", "8", "--request-count", "4"]
    shared = ["--model", server.model, "--url", server.url, "--tokenizer", str(server.target), "--ui", "none"]
    profile = ["aiperf", "profile", "--streaming", *shared, "--output-artifact-dir"]
    folder, artifacts = FOLDER / "speed_bench", str(FOLDER / "artifacts")
    questions = ["--input-file", str(speed_bench_file()), "--custom-dataset-type", "speed-bench-coding"]
    limits = ["--osl", "8", "--num-conversations", "1"]
    kinds = ("chat", "completions", "responses")
    return {
        **{f"{kind}, streamed": [*profile, artifacts, "--endpoint-type", kind, *sizes] for kind in kinds},
        "SPEED-Bench": [*profile, str(folder / "coding"), "--endpoint-type", "chat", *questions, *limits],
        "speed-bench-report": ["aiperf", "speed-bench-report", str(folder), "--output", str(folder / "report.csv")],
    }


def speed_bench_file() -> Path:
    """Our invented questions in the form of SPEED-Bench that aiperf reads, which wants ids of 32 characters."""
    path, lines = FOLDER / "speed_bench.jsonl", (ROOT / "tests/support/questions/speed_bench.jsonl").open()
    with lines, path.open("w") as file:
        for number, row in enumerate(map(json.loads, lines)):
            messages = [{"role": "user", "content": turn} for turn in row["turns"]]
            kept = {"question_id": f"{number:032}", "category": row["category"], "messages": messages}
            file.write(json.dumps(kept) + "\n")
    return path


def guidellm(server: Server) -> dict[str, list[str]]:
    data = "kind=synthetic_text,prompt_tokens=24,output_tokens=8"
    run = ["guidellm", "run", "--backend", f"kind=openai_http,target={server.url}", "--profile", "kind=synchronous"]
    limits = ["--constraint", "kind=max_requests,count=3", "--constraint", "kind=max_errors,count=1"]
    tokenizer = ["--tokenizer", f"kind=huggingface_auto,model={server.target}"]
    out = ["--output", f"kind=json,path={FOLDER / 'guidellm.json'}", "--disable-progress"]
    totals = f"json.load(open({str(FOLDER / 'guidellm.json')!r}))['benchmarks'][0]['metrics']['request_totals']"
    return {
        "synchronous": [*run, "--data", data, *limits, *tokenizer, *out],
        "synchronous, no errors": ["python", "-c", f"import json; print(t := {totals}); assert t['successful'] == 3"],
    }


NODE = ("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92")
CLIENTS = {
    "openai": Client(("openai==3.57.0",)),
    "openai (Node)": Client(NODE, is_node=True),
    "langchain-openai": Client(("langchain-openai==1.7.4",)),
    "instructor": Client(("instructor==1.17.0",)),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.68.0",)),
    "openai-agents": Client(("openai-agents==0.24.0",)),
    "smolagents": Client(("smolagents[openai]==1.26.0",)),
    "litellm": Client(("litellm==1.110.2",)),
    "Vercel's AI SDK": Client(NODE, is_node=True),
    "lm-eval": Client(("lm-eval[api]==0.4.13", "transformers==5.24.0"), lm_eval),
    "aiperf": Client(("aiperf==0.13.0",), aiperf),
    "guidellm": Client(("guidellm==0.8.1",), guidellm),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of a chat model")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (default: all)")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CLIENTS]:
        parser.error(f"{unknown[0]}: no such client, one of {', '.join(CLIENTS)} is needed")
    FOLDER.mkdir(exist_ok=True)
    target = given.target.resolve()
    failed: list[str] = []
    with serving(target) as url:
        server = Server(url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"], target)
        for name in given.names or CLIENTS:
            packages = ", ".join(CLIENTS[name].packages)
            print(f"{name} ({packages})", flush=True)
            for line in use(name, CLIENTS[name], server):
                print(f"  {line}", flush=True)
                failed += [f"{name}: {line}"] if line.startswith("FAIL") else []
    print("\n".join(["", f"{len(failed)} failed", *failed]) if failed else "\nevery client works")
    sys.exit(1 if failed else 0)


@contextmanager
def serving(target: Path) -> Iterator[str]:
    """The address of a server of this target."""
    command = [sys.executable, "-m", "headstart.cli", "serve", "--target", str(target), "--dtype", "float32"]
    path = FOLDER / "server.log"  # a pipe would fill, and the server would wait for a reader
    command += ["--port", "0"]
    with path.open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
        try:
            while (found := re.search(r"^http://\S+(?=/ )", path.read_text(), re.MULTILINE)) is None:
                assert process.poll() is None, path.read_text()
                time.sleep(0.5)
            yield found.group()
        finally:
            process.kill()


def use(name: str, client: Client, server: Server) -> Iterator[str]:
    """Install a client and use it; yields `ok WHAT` or `FAIL WHAT: WHY` for each use."""
    folder, log = FOLDER / ("node" if client.is_node else name), FOLDER / f"{name}.log"
    log.write_text("")
    if said := install(folder, client, log):
        yield f"FAIL installation: {said}"
        return
    if client.commands is not None:
        for what, command in client.commands(server).items():
            said = run([str(folder / "bin" / command[0]), *command[1:]], log)
            yield f"FAIL {what}: {said}" if said else f"ok {what}"
        return
    program = ["node", HERE / "use_clients.mjs"] if client.is_node else [folder / "bin/python", HERE / "use_clients.py"]
    said = run([*map(str, program), name, f"{server.url}/v1", server.model, str(folder)], log)
    found = [line for line in log.read_text().splitlines() if line.startswith(("ok ", "FAIL "))]
    yield from found
    if said and not any(line.startswith("FAIL ") for line in found):
        yield f"FAIL at all: {said}"


def install(folder: Path, client: Client, log: Path) -> str:
    """Make the client's environment unless it is there; returns why that failed, or nothing."""
    stamp, wanted = folder / ".installed", "\n".join(client.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return ""
    folder.mkdir(exist_ok=True)
    npm = [["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", *client.packages]]
    pip = [str(folder / "bin/python"), "-m", "pip", "install", *client.packages]
    for command in npm if client.is_node else [[sys.executable, "-m", "venv", str(folder)], pip]:
        if said := run(command, log):
            return said
    stamp.write_text(wanted)
    return ""


def run(command: list[str], log: Path) -> str:
    """Run a command; its output goes to the log. Returns why it failed, or nothing."""
    with log.open("a") as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=out, env=os.environ | QUIET, timeout=LONGEST).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[-300:]
    last = (log.read_text().split() or ["no output"])[-40:]
    return f"exit code {code}, see {log.relative_to(ROOT)}: {' '.join(last)[-300:]}" if code else ""


if __name__ == "__main__":
    main()
