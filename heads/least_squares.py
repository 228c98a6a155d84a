"""Ridge regression from sums over batches, so that no more than one batch is in memory."""

import torch
from jaxtyping import Float
from torch import Tensor

RIDGE = 0.01  # added to the mean square of every input, which is about 1


class LeastSquares:
    """The linear map that predicts directions from inputs with the least squared error."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.count = 0
        self.products = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self.targets = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)

    def add(self, inputs: Float[Tensor, "count inputs"], outputs: Float[Tensor, "count outputs"]) -> None:
        """Add pairs; each output counts by its direction alone, scaled to a root mean square of 1."""
        inputs, outputs = inputs.float(), outputs.float()
        outputs = outputs / outputs.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        self.count += len(inputs)
        self.products += (inputs.T @ inputs).cpu()
        self.targets += (inputs.T @ outputs).cpu()

    def solve(self) -> tuple[Float[Tensor, "outputs inputs"], float]:
        """The weight of the map, and the root mean square of what it predicts (1 if it explains everything)."""
        ridge = RIDGE * self.count * torch.eye(len(self.products), dtype=torch.float64)
        weight = torch.linalg.solve(self.products + ridge, self.targets)  # [inputs, outputs]
        squares = ((self.products @ weight) * weight).sum() / (self.count * weight.shape[1])
        return weight.T.float(), float(squares.sqrt())
