"""The gradients of a model in one buffer, at addresses that stay."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 64
"""Elements: each gradient begins at a multiple, as kernels that read several at once need it."""


class FlatGradients:
    """A buffer for each data type, and in it a view for each parameter that needs a gradient.

    ``weight`` is one number more: the sum of the weights of the targets that the gradients are of,
    which so needs no all-reduce of its own.

    Args:
        parameters: by their names, each once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, parameter in self._parameters.items():
            by_dtype.setdefault(parameter.dtype, []).append(name)
        self.buffers: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        for names in by_dtype.values():
            self._lay_out(names)
        # 16 bits do not count beyond some hundreds
        wide = [buffer for buffer in self.buffers if buffer.dtype.itemsize >= 4]
        if not wide:
            like = next(iter(parameters.values()))  # perhaps all are frozen, for now
            wide = [like.new_zeros(1, dtype=torch.float32)]
            self.buffers += wide
        self.weight = wide[0][-1]

    def _lay_out(self, names: list[str]) -> None:
        sizes = [-(-self._parameters[name].numel() // ALIGNMENT) * ALIGNMENT for name in names]
        first = self._parameters[names[0]]
        buffer = first.new_zeros(sum(sizes) + 1)  # the last one may be the weight
        self.buffers.append(buffer)
        for name, part in zip(names, torch.split(buffer[:-1], sizes), strict=True):
            self._views[name] = _as_parameter(part, self._parameters[name])

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def aliases(self) -> dict[str, Tensor]:
        """Leaves with the parameters' memory, whose gradients are added into the buffers.

        Autograd adds a gradient on the stream on which the leaf was first used. DDP has used the
        parameters outside of any capture, and it waits for their hooks; new leaves know neither.
        """
        leaves = {}
        for name, parameter in self._parameters.items():
            leaf = parameter.detach().requires_grad_()
            leaf.grad = self._views[name]
            leaves[name] = leaf
        return leaves

    def sum_over_ranks(self) -> None:
        for buffer in self.buffers:
            dist.all_reduce(buffer)

    def make_mean(self, samples: int) -> None:
        """Of gradients of the sum over the targets / ``samples``, make those of the mean by weight;
        without any weight they stay 0."""
        ratio = torch.where(self.weight > 0, samples / self.weight, 1.0)
        for buffer in self.buffers:
            buffer *= ratio

    def give_to_parameters(self) -> None:
        """Let clipping and the optimizer find the gradients where they look for them."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._views[name]


def _as_parameter(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of the part's beginning in the shape and, if it leaves no gaps, the layout."""
    like = torch.empty_like(parameter, device="meta")  # dense, in the parameter's order
    return part.as_strided(like.size(), like.stride(), part.storage_offset())
