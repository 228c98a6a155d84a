"""A start of training: the linear map, fitted by least squares, that predicts the target's next state."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headstart.heads.base import DraftHead

RIDGE = 0.01  # added to the mean square of every input, which is about 1


class LeastSquares:
    """Ridge regression from sums over batches, so that only one batch is in memory."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.count = 0
        self.products = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)  # sum of input x input
        self.targets = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)  # sum of input x output

    def add(self, inputs: Float[Tensor, "count inputs"], outputs: Float[Tensor, "count outputs"]) -> None:
        inputs, outputs = inputs.float(), outputs.float()
        self.count += len(inputs)
        self.products += (inputs.T @ inputs).cpu()
        self.targets += (inputs.T @ outputs).cpu()

    def solve(self) -> Float[Tensor, "inputs outputs"]:
        """The weight of the map, float64."""
        ridge = RIDGE * self.count * torch.eye(len(self.products), dtype=torch.float64)
        return torch.linalg.solve(self.products + ridge, self.targets)

    def size(self, weight: Float[Tensor, "inputs outputs"]) -> float:
        """The root mean square of what a map predicts."""
        squares = ((self.products @ weight) * weight).sum() / (self.count * weight.shape[1])
        return float(squares.sqrt())

    def principal_outputs(self, weight: Float[Tensor, "some outputs"], first: int, rank: int) -> Tensor:
        """The directions in which the inputs from number `first` on move the outputs most. [outputs, rank]"""
        moments = weight.T @ self.products[first:, first:] @ weight
        return torch.linalg.eigh(moments).eigenvectors[:, -rank:]


class LinearStart(DraftHead):
    """A head that can start as a fitted map."""

    @property
    @abstractmethod
    def starts_linear(self) -> bool:
        """Whether a head of these sizes can."""

    @property
    @abstractmethod
    def num_linear_inputs(self) -> int:
        """The width of `linear_inputs`."""

    @abstractmethod
    def linear_inputs(
        self, taps: Float[Tensor, "count tapped"], tokens: Int[Tensor, " count"]
    ) -> Float[Tensor, "count inputs"]:
        """The inputs of the map: what the first level reads of the taps at a position and of the next token."""

    @abstractmethod
    def start_with_fit(self, fit: LeastSquares, generator: torch.Generator) -> None:
        """Set the weights to the fitted map from these inputs to the target's normed state at the next position."""
