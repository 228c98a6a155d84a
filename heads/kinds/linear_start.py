"""A start of training: the linear map, fitted by least squares, that predicts the target's next state."""

import torch
from jaxtyping import Float
from torch import Tensor

RIDGE = 0.01  # added to the mean square of every input, which is about 1


class LeastSquares:
    """Ridge regression from sums over batches, so that only one batch is in memory."""

    def __init__(self) -> None:
        self.count = 0
        self.products = torch.zeros(1, 1, dtype=torch.float64)  # sum of input x input
        self.targets = torch.zeros(1, 1, dtype=torch.float64)  # sum of input x output

    def add(self, inputs: Float[Tensor, "count inputs"], outputs: Float[Tensor, "count outputs"]) -> None:
        inputs, outputs = inputs.float(), outputs.float()
        self.count += len(inputs)
        self.products = self.products + (inputs.T @ inputs).cpu()
        self.targets = self.targets + (inputs.T @ outputs).cpu()

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
