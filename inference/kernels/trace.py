"""Find the operations of a target that give the same inputs other bits in another pass."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, str, int, int]  # a module's name, whether before or after it, the numbers of its call and a tensor
Values = dict[int, Tensor]  # one token's, by position


@dataclass(frozen=True)
class Difference:
    """An operation whose inputs are equal in two passes, bit for bit, but not its outputs."""

    operation: str  # a class of module, or the code of one between two of its modules
    path: str  # the module's name in the target
    shape: tuple[int, ...]  # of the tensor
    tokens: int  # that the pass computes, of all rows together
    largest: float  # difference of two numbers


class Trace:
    """What each module of a target reads and returns for the tokens of a text, in passes that may compute others too.

    A token is known by its position: other rows and wrong draft tokens must have other tokens there. If the trace of
    earlier passes over the same text is given as `wanted`, every number that differs is replaced by the wanted one, so
    that each operation gets equal inputs, and `differences` has all whose outputs differ, in the order of execution.
    """

    def __init__(self, model: nn.Module, text: list[int], wanted: "Trace | None" = None) -> None:
        self.model, self.text, self.wanted = model, torch.tensor(text, device=next(model.parameters()).device), wanted
        # Experts call their activation for a few tokens at a time, in an order of their own.
        experts = [each for each in model.modules() if any(own.ndim == 3 for own in each.parameters(recurse=False))]
        inside = {part for each in experts for part in each.modules() if part is not each}
        self.names = {module: name for name, module in model.named_modules() if module not in inside}
        self.values: dict[Place, Values] = {}
        self.differences: list[Difference] = []

    @contextmanager
    def running(self) -> Iterator["Trace"]:
        """Within this context, the target's passes are traced."""
        hooks = [self.model.register_forward_pre_hook(self.begin_pass, with_kwargs=True)]
        for module in [*self.names][1:]:
            hooks.append(module.register_forward_pre_hook(self.before, with_kwargs=True))
            hooks.append(module.register_forward_hook(self.after))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def begin_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens, positions = kwargs["input_ids"], kwargs.get("position_ids")
        rows, seq = tokens.shape
        positions = (torch.arange(seq, device=tokens.device) if positions is None else positions).expand(rows, seq)
        is_ours = (positions < len(self.text)) & (self.text[positions.clamp(max=len(self.text) - 1)] == tokens)
        self.shape, self.logits_at = (rows, seq), kwargs.get("logits_to_keep")
        self.row, self.column = is_ours.nonzero(as_tuple=True)
        self.positions = positions[self.row, self.column].tolist()
        self.calls: Counter[nn.Module] = Counter()
        self.open, self.last = [self.model], ""  # modules that are running; the last one that ended
        self.seen: dict[int, tuple[Tensor, Values]] = {}  # tensors of this pass

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.calls[module] += 1
        inside = type(self.open[-1]).__name__
        self.open.append(module)
        kept = {name: value for name, value in kwargs.items() if "mask" not in name}
        operation = f"{inside} before {self.names[module].rpartition('.')[2]}"
        args, kept = self.compared(module, "before", operation, (args, kept))
        self.last = ""
        return args, {**kwargs, **kept}

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.open.pop()
        operation = f"{type(module).__name__} after {self.last}" if self.last else type(module).__name__
        output = self.compared(module, "after", operation, (output,))[0]
        self.last = self.names[module].rpartition(".")[2]
        return output

    def compared(self, module: nn.Module, when: str, operation: str, values: Any) -> Any:
        """The same values; those that differ from the wanted ones are replaced by these."""
        numbers = count()

        def visit(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(visit(each) for each in value)
            if type(value) is dict:
                return {name: visit(each) for name, each in value.items()}
            if type(value) is not Tensor and not isinstance(value, nn.Parameter):
                return value
            place = self.names[module], when, self.calls[module], next(numbers)
            return self.compared_tensor(place, operation, value)

        return visit(values)

    def compared_tensor(self, place: Place, operation: str, tensor: Tensor) -> Tensor:
        if id(tensor) in self.seen:  # another module has read or returned it
            self.values.setdefault(place, self.seen[id(tensor)][1])
            return tensor
        index = self.index(tensor)
        if index is None:
            return tensor
        at, positions = index
        found, values = tensor[at], self.values.setdefault(place, {})
        if self.wanted is None:
            values.update(zip(positions, found.unbind(), strict=True))
        else:
            known = self.wanted.values.get(place, {})
            pairs = [(i, known[p]) for i, p in enumerate(positions) if p in known and known[p].shape == found.shape[1:]]
            if pairs:
                which, wanted = [i for i, _ in pairs], torch.stack([value for _, value in pairs])
                if not torch.equal(found[which], wanted):
                    largest = float((found[which].double() - wanted.double()).abs().max())
                    shape, tokens = tuple(tensor.shape), self.shape[0] * self.shape[1]
                    self.differences.append(Difference(operation, place[0], shape, tokens, largest))
                    tensor = tensor.clone()
                    tensor[tuple(each[which] for each in at)] = wanted
        self.seen[id(tensor)] = tensor, values
        return tensor

    def index(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], list[int]] | None:
        """Where a tensor has the text's tokens, and their positions; None if it has no axis of tokens."""
        rows, seq = self.shape
        if tensor.shape[:2] == self.shape:
            return (self.row, self.column), self.positions
        if tensor.shape[:2] == (1, seq):
            return (torch.zeros_like(self.row), self.column), self.positions
        if tensor.ndim > 1 and tensor.shape[0] == rows * seq:
            return (self.row * seq + self.column,), self.positions
        if isinstance(self.logits_at, list) and tensor.shape[:2] == (rows, len(self.logits_at)):
            places = {column: place for place, column in enumerate(self.logits_at)}
            kept = [i for i, column in enumerate(self.column.tolist()) if column in places]
            column = torch.tensor([places[int(self.column[i])] for i in kept], dtype=torch.long, device=tensor.device)
            return (self.row[kept], column), [self.positions[i] for i in kept]
        return None
