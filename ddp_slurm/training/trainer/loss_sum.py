"""The losses of a rank, added up on its device."""

import torch
from torch import Tensor


class LossSum:
    """This rank's losses since the last reset: their sum, the sum of their weights, the samples."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._loss, self._weight = self.sums.unbind()  # views: += changes the sums
        self.samples = 0

    def add(self, loss: Tensor, weight: float | Tensor) -> None:
        """``loss`` is a sum over targets, ``weight`` the sum of their weights.

        Nothing but operations on the device: a graph may repeat them.
        """
        self._loss += loss
        self._weight += weight

    def totals(self) -> tuple[float, float]:
        """Sum of losses and sum of weights. Waits for the GPU."""
        loss, weight = self.sums.tolist()
        return loss, weight

    def reset(self, loss: float = 0.0, weight: float = 0.0, samples: int = 0) -> None:
        self.sums[0] = loss
        self.sums[1] = weight
        self.samples = samples
