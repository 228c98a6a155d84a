"""Whether steps should draft at the present load: drafts stop where they do not pay, and are tried again later."""

import numpy

from headstart.inference.core.drafter import Drafter
from headstart.inference.core.verify import Accepted
from headstart.inference.drafters.build import load_costs
from headstart.inference.drafters.costs import CostTable, Ran
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection

STEP_DECAY = 0.98  # weight of a step relative to the next, so that a hard passage does not stop drafting
STEPS_AT_RETRY = 4.0  # weight of all earlier steps, in steps, when drafting resumes
PATIENCE, PATIENCE_AT_RETRY = 3.0, 1.0  # plain steps that drafts may cost, without paying, before they stop
STOP_GAIN, RESUME_GAIN = 0.98, 1.05  # speed relative to plain decoding below which drafts stop, above which they resume
DRAFT_RETRY_STEPS_MIN, DRAFT_RETRY_STEPS_MAX = 32, 256  # plain steps before drafting is tried again
REST_PER_LOSS = 40  # at least this many for each plain step that the next trial will cost


class SpeculationByLoad:
    """Compares the expected speed of a step with drafts to that of a plain step, both from measured costs.

    The tokens per draft are observed; its cost follows from the table for the rows that decode now. So drafts stop when
    the batch grows and resume when it shrinks, with a gap between the two limits so that they do not flicker. One of
    these serves all texts of a drafter, so that each does not begin with drafts that did not pay in the last.
    """

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.is_on = True
        self.steps = 0.0  # weighted number of observed steps with drafts
        self.tokens = self.nodes = self.levels = 0.0  # weighted sums over these: tokens per row, tree size, its levels
        self.patience, self.rest = PATIENCE, DRAFT_RETRY_STEPS_MIN
        self.resting = DRAFT_RETRY_STEPS_MIN  # steps of the present rest
        self.lasted = 0  # steps since it was last switched

    def gain(self, rows: int) -> float | None:
        """The speed with drafts, relative to plain decoding; None before anything was observed."""
        if not self.steps:
            return None
        tokens, nodes, levels = (total / self.steps for total in (self.tokens, self.nodes, self.levels))
        costs = self.costs.of(rows)
        target = numpy.interp(nodes, range(len(costs.verify) + 1), [costs.plain, *costs.verify])
        return float(tokens * self.costs.plain(rows) / (target + costs.drafting(levels)))

    def pays(self, rows: int) -> bool:
        """Whether the next step should draft. Call it once before each step that may."""
        gain = self.gain(rows)
        if gain is None:
            return self.is_on
        self.lasted += 1
        if self.is_on:
            loss = self.tokens / self.steps * (1 / gain - 1)  # of a step, in plain steps
            self.patience = PATIENCE if gain >= STOP_GAIN else self.patience - loss
            if self.lasted > self.rest:  # a few lucky steps do not show that drafts pay again
                self.rest = DRAFT_RETRY_STEPS_MIN
            if self.patience <= 0:
                self.is_on, self.lasted, self.resting = False, 0, max(self.rest, round(REST_PER_LOSS * (loss - 1)))
        elif gain > RESUME_GAIN or self.lasted >= self.resting:
            if gain > RESUME_GAIN:  # fewer rows decode
                self.rest = DRAFT_RETRY_STEPS_MIN
            else:
                self.rest = min(2 * self.rest, DRAFT_RETRY_STEPS_MAX)
                self._forget()
            self.is_on, self.lasted, self.patience = True, 0, PATIENCE_AT_RETRY
        return self.is_on

    def _forget(self) -> None:
        """Reduce the weight of all earlier steps to a few."""
        if self.steps > STEPS_AT_RETRY:
            share = STEPS_AT_RETRY / self.steps
            self.tokens, self.nodes, self.levels = share * self.tokens, share * self.nodes, share * self.levels
            self.steps = STEPS_AT_RETRY

    def observe(self, accepted: list[Accepted], step: Ran) -> None:
        """Learn from a step; rows without drafts do not count."""
        taken = [len(each.tokens) for each in accepted if each.drafted]
        if taken:
            self.steps = STEP_DECAY * self.steps + 1
            self.tokens = STEP_DECAY * self.tokens + sum(taken) / len(taken)
            self.nodes = STEP_DECAY * self.nodes + step.nodes - 1
            self.levels = STEP_DECAY * self.levels + step.levels


def speculation_for(decode: DecodeSection, target: TargetModel, drafter: Drafter) -> SpeculationByLoad | None:
    """The switch for a recipe's drafter; None for a drafter whose costs cannot be measured."""
    costs = load_costs(decode, target, drafter)
    return None if costs is None else SpeculationByLoad(costs)
