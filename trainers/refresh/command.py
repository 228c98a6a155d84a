"""Let the head of a running server learn from its traffic. Its texts stay the same; only their speed changes.

    headstart serve recipes/tiny.yaml --adapt-memory 0.25
    headstart adapt recipes/tiny.yaml
    headstart adapt recipes/tiny.yaml --roll-back

The server keeps finished requests in memory. A candidate is trained on them, together with a share of the recipe's own
features, from the weights of the served head. It is served only if it accepts more of the held-out requests, beyond the
95 % interval; requests that have begun are finished with the head they began with. This process may be killed at any
time; it runs at a low priority and needs the target's embedding, norm and lm_head alone.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headstart.common.errors import CONTINUES
from headstart.common.files import append_jsonl, read_json, remove, write_text
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.features.shards import stored_taps
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_taps, load_head, load_head_for, save_head
from headstart.heads.target_config import folder_of
from headstart.inference.drafters.growth import Growth
from headstart.recipes import Recipe, run_command
from headstart.recipes.other_commands import AdaptOptions, adapt_options
from headstart.trainers.refresh.candidate import Snapshot, train_candidate
from headstart.trainers.refresh.judge import LEAST, judge
from headstart.trainers.refresh.server import RefusedError, Server, UnreachableError

NICE = 15  # the learner gives way to the server
LOOK = 10.0  # seconds between looks at the server
WIDTH = 4  # usual guesses at each level of a tree
KEPT = 8  # newest versions, besides the first one


def main() -> None:
    run_command(__doc__, adapt, CONTINUES, adapt_options)


def adapt(recipe: Recipe, options: AdaptOptions) -> None:
    """Adapt the served head again and again, or once."""
    versions, server = Versions(options.versions or recipe.run_dir / "versions"), Server(options.server)
    if options.roll_back:
        server.facts()  # nothing is written if the server is not there
        chosen = versions.go_back()
        server.serve(str(chosen))
        return print(f"{chosen} is served again")
    os.nice(NICE)
    with only_run_in(versions.folder, "an adaptation"):
        frozen = FrozenTarget.from_folder(folder_of(recipe.target), torch.float32)
        learner = Learner(recipe, options, versions, server, frozen)
        while True:
            try:
                learner.look(not options.once)
            except UnreachableError as error:  # the server may come back
                if options.once:
                    raise
                print(error, flush=True)
            if options.once:
                return
            time.sleep(LOOK)


class Versions:
    """The heads that a server has been given, one whole folder each, and a file that says which one it should serve.

    `folder/0000` is the head that the server began with; `folder/served.json` names the served one. Folders
    and the file appear whole or not at all, so a kill at any moment leaves a head to serve.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.path = self.folder / "served.json"

    @property
    def served(self) -> Path | None:
        """The head to serve; None before the first."""
        return self.folder / self._state()["served"] if self.path.is_file() else None

    @property
    def before(self) -> list[str]:
        """The versions that were served before the present one, the last one last."""
        return self._state()["before"]

    def names(self) -> list[str]:
        """All versions, ascending."""
        return sorted(path.name for path in self.folder.glob("[0-9]*") if path.name.isdecimal())

    def add(self, head: Path) -> Path:
        """Move a head's whole folder, which is on the same disk, under the next number; it is not served yet."""
        number = max(map(int, self.names()), default=-1) + 1
        return head.rename(self.folder / f"{number:04d}")

    def choose(self, name: str) -> None:
        """Serve this version from now on, and drop the oldest of those that are not needed."""
        before = [] if self.served is None else [*self.before, self.served.name]
        self._write(name, before)
        for old in self.names()[1:-KEPT]:
            if old != name:
                remove(self.folder / old)

    def go_back(self) -> Path:
        """Serve the version before the present one; raises ValueError if there is none."""
        whole = self.names()
        before = [] if self.served is None else [name for name in self.before if name in whole]
        if not before:
            here = "none" if self.served is None else self.served.name
            raise ValueError(f"--roll-back: {here} is served and no head was before it in {self.folder}; leave it out")
        self._write(before[-1], before[:-1])
        return self.folder / before[-1]

    def _state(self) -> dict[str, Any]:
        return read_json(self.path, "write the name of a version as its `served`")

    def _write(self, served: str, before: list[str]) -> None:
        write_text(self.path, json.dumps({"served": served, "before": before}) + "\n")


@dataclass
class Learner:
    """Trains candidates for the head of one server."""

    recipe: Recipe
    options: AdaptOptions
    versions: Versions
    server: Server
    frozen: FrozenTarget
    learned: dict[str, int] = field(default_factory=dict)  # run of the server -> its tokens at the last candidate

    @property
    def candidate(self) -> Path:
        """The folder of the candidate that is being made; it is removed when that is judged."""
        return self.versions.folder / "candidate"

    def look(self, waits: bool) -> None:
        """Let the server serve the chosen version, and make a candidate if there is enough new traffic."""
        remove(self.candidate)  # left by a learner that was killed, or that lost its server
        facts = self.server.facts()
        served = self.begin(facts)
        if waits and facts["tokens"] - self.learned.get(facts["run"], 0) < self.options.after:
            return
        self.learned = {facts["run"]: facts["tokens"]}
        snapshot = self.take_snapshot(served)
        if snapshot is None:
            return
        made = train_candidate(self.recipe, self.candidate, served, snapshot, self.options.steps)
        self.offer(made, snapshot)
        remove(self.candidate)

    def begin(self, facts: dict[str, Any]) -> Path:
        """The chosen version, which is served from now on; at first it is the head that the server began with."""
        if self.versions.served is None:
            first = self.versions.folder / "0000"
            if not first.exists():
                partial = first.with_name("0000.partial")
                save_head(load_head(facts["head"], folder_of(self.recipe.target)), partial)
                self.versions.add(partial)
            self.versions.choose(first.name)
        served = self.versions.served
        assert served is not None
        if facts["head"] != str(served):  # it was started again
            self.server.serve(str(served))
        return served

    def take_snapshot(self, served: Path) -> Snapshot | None:
        """The server's traffic; None if it is too little to train on, or to judge by."""
        samples: dict[bool, list[Any]] = {False: [], True: []}
        for heldout, sample in self.server.traffic(self.taps, self.frozen.config):
            samples[heldout].append(sample)
        snapshot = Snapshot(served.name, samples[False], samples[True])
        if len(snapshot.heldout) < LEAST or not snapshot.train:
            found = f"{len(snapshot.train)} requests to train on and {len(snapshot.heldout)} held out"
            print(f"{found}; {LEAST} held out are needed: waiting for more traffic", flush=True)
            return None
        return snapshot

    def offer(self, made: Path, snapshot: Snapshot) -> None:
        """Judge the head in a folder on held-out traffic, print the verdict, and serve the head if it is better."""
        served = self.versions.folder / snapshot.served
        candidate, before = load_head_for(made, self.frozen), load_head_for(served, self.frozen)
        growth = Growth.from_section(self.recipe.decode, before.max_levels)
        verdict = judge(candidate, before, snapshot.heldout, growth.depth, min(growth.width, WIDTH))
        print(verdict, flush=True)
        current = self.versions.served
        is_chosen = verdict.is_better and current == served  # nobody has rolled back meanwhile
        version = None
        if is_chosen:
            path = self.versions.add(made)
            self.versions.choose(path.name)
            try:
                self.server.serve(str(path))
            except RefusedError:
                self.versions.go_back()
                raise
            version = path.name
        print(f"version {version} is served" if version else f"version {snapshot.served} stays", flush=True)
        facts = {"from": snapshot.served, "version": version, "trained_on": len(snapshot.train), **vars(verdict)}
        append_jsonl(self.versions.folder / "verdicts.jsonl", [facts])

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's taps without the last hidden state."""
        config = self.frozen.config
        return stored_taps(head_taps(self.recipe.head, config), config.num_layers)


if __name__ == "__main__":
    main()
