"""An epoch of training from an object store with an empty cache, beside one from the local disk.

    python benchmarks/object_store.py recipes/tiny.yaml

Harvests the recipe if that was not done, puts the features into a bucket of a server of moto's on loopback (extra dev),
and trains an epoch from the disk and from the bucket in turn. The time is that of the steps, waits for samples
included; the disk's files are in memory after the harvest, so the comparison favours the disk. Ends with
status 1 if the bucket takes more than 1.1 times as long.
"""

import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from headstart.common.remote import filesystem, mirror_of
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.recipes import Recipe, run_command
from headstart.trainers import loop
from headstart.trainers.eagle import train

ROUNDS = 5
WHOLE = 1.1  # the most that an epoch from the store may take, as a share of one from the disk
URL = "s3://bucket/features"


def run(recipe: Recipe) -> None:
    features = harvest(recipe).folder
    num_bytes = sum(path.stat().st_size for path in features.glob("train-*.safetensors"))
    steps = math.ceil(len(FeatureStore(features, "train")) / recipe.train.batch_size)
    seconds: dict[str, list[float]] = {"disk": [], "object store": []}
    with tempfile.TemporaryDirectory(dir=recipe.run_dir) as name, object_store():
        folder = Path(name)
        filesystem("s3").put(str(features), URL, recursive=True)
        for _ in range(ROUNDS):
            seconds["disk"].append(epoch(recipe, folder, features, steps))
            os.environ["HEADSTART_CACHE"] = str(folder / "cache")
            seconds["object store"].append(epoch(recipe, folder, mirror_of(URL), steps))
            shutil.rmtree(folder / "cache")
    table = Table("epoch from", "seconds, median", "each round")
    for place, times in seconds.items():
        table.add_row(place, f"{statistics.median(times):.2f}", " ".join(f"{each:.2f}" for each in times))
    console = Console(highlight=False)
    console.print(table)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    console.print(f"{steps} steps over {decimal(num_bytes)}: {ratio:.3f} x the disk's time; at most {WHOLE} is wanted")
    if ratio > WHOLE:
        raise SystemExit(1)


def epoch(recipe: Recipe, folder: Path, store: Path, steps: int) -> float:
    """The seconds from the first step of an epoch to the end of its last."""
    times: list[float] = []
    step = loop.train_step

    def timed(*arguments: Any) -> Any:
        times.append(time.perf_counter())
        result = step(*arguments)
        times.append(time.perf_counter())
        return result

    section = recipe.train.model_copy(update={"steps": steps, "checkpoint_every": steps, "eval_prompts": 0})
    data = recipe.data.model_copy(update={"store": store, "folder": recipe.data_folder})
    changes = {"run_dir": folder / "run", "train": section, "data": data}
    with patch.object(loop, "train_step", timed):
        train(recipe.model_copy(update=changes))
    shutil.rmtree(folder / "run")
    return times[-1] - times[0]


@contextmanager
def object_store() -> Iterator[None]:
    """A server of moto's in a process of its own, with a bucket, as the store of this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(credentials, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise ValueError("moto's server does not start; install it: pip install -e '.[dev]'")
            time.sleep(0.1)
        filesystem("s3").mkdir(URL.rpartition("/")[0])
        yield
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    run_command(__doc__, run)


if __name__ == "__main__":
    main()
