"""The memory that autograd keeps for the backward pass, measured."""

from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedForBackward:
    """A context manager that adds up the storages that autograd saves, each once, except those in `known`."""

    def __init__(self, known: set[int]) -> None:
        self.known, self.tensors = known, dict[int, Tensor]()
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def _keep(self, tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in self.known:
            self.tensors[storage_of(tensor)] = tensor  # kept alive, so that no later storage gets the same id
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
