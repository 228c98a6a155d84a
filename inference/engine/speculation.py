"""Whether drafts pay at the present load: with many rows, a step that verifies trees may cost more than it saves."""

import numpy

from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Accepted
from headstart.inference.drafters.costs import CostTable, Situation

MEMORY = 0.98  # weight of each observed step relative to the one after it: a hard passage does not end drafts
RECENT = 8.0  # observed steps that the earlier ones weigh as much as, once drafts are tried again
PATIENCE = 8  # steps for which drafts continue without paying
STOP, RESUME = 0.98, 1.05  # speed relative to plain decoding: drafts stop below the one, and resume above the other
REST = 32, 256  # plain steps until drafts are tried again, as the texts may have become easier: at first, at most


class SpeculationByLoad:
    """Compares the expected speed of a step with drafts to that of a plain step, both from measured costs.

    What a draft brings is observed; what it costs follows from the table for the rows that decode now. So drafts stop
    when the batch grows and resume when it shrinks, with a gap between the two so that they do not go back and forth.
    """

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.is_on = True
        self.steps = 0.0  # weighted number of observed steps with drafts
        self.tokens = self.nodes = self.levels = 0.0  # weighted sums over these: tokens per row, tree size, its levels
        self.patience, self.plain_steps, self.rest = PATIENCE, 0, REST[0]

    def gain(self, at: Situation) -> float | None:
        """The speed with drafts, relative to plain decoding; None before anything was observed."""
        if not self.steps:
            return None
        tokens, nodes, levels = (total / self.steps for total in (self.tokens, self.nodes, self.levels))
        now = self.costs.now(at)
        largest = max(round(nodes + 0.5), 2)
        sizes, seconds = numpy.arange(largest + 1), numpy.array([now.target[0], *now.verify(largest)])
        drafting = now.first_level + max(levels - 1, 0) * now.level
        return float(tokens * now.target[0] / (numpy.interp(nodes, sizes, seconds) + drafting))

    def pays(self, at: Situation) -> bool:
        """Whether the next step should draft. Call it once before each step that may."""
        gain = self.gain(at)
        if gain is None:
            return self.is_on
        if self.is_on:
            self.patience = PATIENCE if gain >= STOP else self.patience - 1
            self.is_on = self.patience > 0
            if gain >= STOP:
                self.rest = REST[0]
        else:
            self.plain_steps += 1
            if gain > RESUME:
                self._resume()
            elif self.plain_steps == self.rest:
                self.rest = min(2 * self.rest, REST[1])
                self._forget()
                self._resume()
        return self.is_on

    def _resume(self) -> None:
        self.is_on, self.patience, self.plain_steps = True, PATIENCE, 0

    def _forget(self) -> None:
        """Let the next steps weigh as much as all before them."""
        if self.steps > RECENT:
            share = RECENT / self.steps
            self.tokens, self.nodes, self.levels = share * self.tokens, share * self.nodes, share * self.levels
            self.steps = RECENT

    def observe(self, accepted: list[Accepted], tree: Tree, levels: int) -> None:
        """Learn from a step with drafts; rows that had none of their own do not count."""
        taken = [len(found.tokens) for found in accepted if found.drafted]
        if taken:
            self.steps = MEMORY * self.steps + 1
            self.tokens = MEMORY * self.tokens + sum(taken) / len(taken)
            self.nodes = MEMORY * self.nodes + tree.shape[1] - 1
            self.levels = MEMORY * self.levels + levels
