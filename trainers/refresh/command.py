"""Let the head of a running server learn from its traffic. Its texts stay the same; only their speed changes.

    headstart serve recipes/tiny.yaml --adapt-memory 0.25
    headstart adapt recipes/tiny.yaml
    headstart adapt recipes/tiny.yaml --roll-back

The server keeps finished requests in memory. A candidate is trained on them, together with a share of the recipe's own
features, from the weights of the served head. It is served only if it accepts more of the held-out requests, beyond the
95 % interval; requests that have begun are finished with the head they began with. This process may be killed at any
time; it runs at a low priority and needs the target's embedding, norm and lm_head alone.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.common.files import remove
from headstart.common.run_lock import only_run_in
from headstart.data_pipelines.features.shards import MANIFEST, stored_taps
from headstart.heads.kinds.checkpoint import head_taps, load_head, save_head
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.recipes import Recipe
from headstart.recipes.other_commands import AdaptOptions
from headstart.trainers.refresh.refresh import Refreshed, refresh
from headstart.trainers.refresh.server import AdaptingServer, RefusedError, UnreachableError
from headstart.trainers.refresh.versions import Versions

RATE = 0.1  # of the recipe's learning rates, which are those of a new head
NICE = 15  # the learner gives way to the server
LOOK = 10.0  # seconds between looks at the server


def adapt(recipe: Recipe, options: AdaptOptions) -> None:
    """Adapt the served head again and again, or once."""
    versions, server = Versions(options.versions or recipe.run_dir / "versions"), AdaptingServer(options.server)
    if options.roll_back:
        server.facts()  # nothing is written if the server is not there
        chosen = versions.go_back()
        server.serve(str(chosen))
        return print(f"{chosen} is served again")
    os.nice(NICE)
    with only_run_in(versions.folder, "an adaptation"):
        learner = Learner(recipe, options, versions, server, TargetConfig.from_folder(folder_of(recipe.target)))
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


@dataclass
class Learner:
    """Trains candidates for the head of one server."""

    recipe: Recipe
    options: AdaptOptions
    versions: Versions
    server: AdaptingServer
    target: TargetConfig
    learned: dict[str, int] = field(default_factory=dict)  # run of the server -> its tokens at the last candidate

    def look(self, waits: bool) -> None:
        """Let the server serve the chosen version, and make a candidate if there is enough new traffic."""
        candidate = self.versions.folder / "candidate"
        remove(candidate)  # left by a learner that was killed
        facts = self.server.facts()
        served = self.begin(facts)
        if waits and facts["tokens"] - self.learned.get(facts["run"], 0) < self.options.after:
            return
        self.learned = {facts["run"]: facts["tokens"]}
        recipe, taps = self.recipe, stored_taps(head_taps(self.recipe.head, self.target), self.target.num_layers)
        store = recipe.data.store or recipe.features_dir
        rates = {name: RATE * getattr(recipe.train, name) for name in ("learning_rate", "muon_learning_rate")}
        refreshed = refresh(
            served,
            self.server.traffic(taps, self.target),
            folder_of(recipe.target),
            candidate,
            steps=self.options.steps,
            replay=store if (store / MANIFEST).is_file() else None,
            train=recipe.train.model_copy(update=rates),
            decode=recipe.decode,
            seed=recipe.seed,
        )
        self.offer(refreshed, served)

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

    def offer(self, refreshed: Refreshed, served: Path) -> None:
        """Print the verdict, and let the server serve the head if it is better than the served one."""
        print(refreshed.verdict, flush=True)
        version = None
        if refreshed.is_new and self.versions.served == served:  # nobody has rolled back meanwhile
            path = self.versions.add(refreshed.head)
            self.versions.choose(path.name)
            try:
                self.server.serve(str(path))
            except RefusedError:
                self.versions.go_back()
                raise
            version = path.name
        print(f"version {version} is served" if version else f"version {served.name} stays", flush=True)
        self.versions.note(**{"from": served.name}, version=version, **vars(refreshed.verdict))
