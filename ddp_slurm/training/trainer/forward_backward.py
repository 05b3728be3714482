"""What a graph of a micro-batch holds."""

from torch import Tensor, nn

from ddp_slurm.training.trainer.loss_sum import LossSum
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss


class ForwardBackward(nn.Module):
    """Forward, loss and backward of a micro-batch, as a module.

    So that ``functional_call`` replaces its parameters until backward is done: a checkpointed part
    runs forward again in it.
    """

    def __init__(
        self, model: nn.Module, loss: WeightedLoss, precision: Precision, loss_sum: LossSum
    ) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._precision = precision
        self._loss_sum = loss_sum
        if isinstance(loss.function, nn.Module):  # its numbers are part of a graph too
            self.loss_module = loss.function
        # one of the buffers, so that a pass can be taken back
        self.register_buffer("loss_sums", loss_sum.sums, persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor, factor: Tensor, weights: Tensor) -> None:
        """Add the gradient of ``factor`` times the sum over the targets, and the targets' weights
        to ``weights``; count the loss."""
        with self._precision.autocast():
            value, sum_factor = self._loss.value_and_factor(self.model(inputs), targets)
        weight = self._loss.weight(targets)
        weights += weight
        self._loss_sum.add(value.detach().double() * sum_factor, weight)
        (value * (factor * sum_factor)).backward()  # type: ignore[no-untyped-call]
