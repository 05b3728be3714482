"""BatchNorm's running statistics on uneven ranks: averaged by sample count, not those of rank 0.

Each rank's BatchNorm sees its own share only, so the running statistics differ by rank. The same
holds for InstanceNorm with running statistics. (SyncBatchNorm, on GPUs, sees the whole batch and
needs none of this.) DDP's ``broadcast_buffers`` would overwrite all of them with rank 0's, on
uneven ranks perhaps those of the smallest share: switch it off.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BatchNormStatistics:
    """Counts this rank's samples and averages the running statistics of all ranks by these counts.

    Args:
        model: the module itself, or its DDP wrapper.
        group: for the reduction; None is the default group.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._layers = {
            name: layer
            for name, layer in inner.named_modules()
            if isinstance(layer, _NormBase) and layer.track_running_stats
        }
        self._group = group
        self.samples = 0

    def count(self, samples: int) -> None:
        """Add the samples that this rank's last forward in training mode has seen."""
        self.samples += samples

    @torch.no_grad()
    def averaged(self) -> dict[str, Tensor]:
        """The averaged statistics by their ``state_dict`` keys; the model keeps its own.

        All ranks call it. Means and variances are weighted by the samples that a rank saw since the
        last ``synchronize``. Before the first sample of any rank the ranks count equally.
        """
        buffers = self._buffers()
        if not buffers or not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return {name: buffer.clone() for name, buffer in buffers.items()}
        floats = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
        total = floats[0].new_full((), self.samples, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        averages = iter(weighted_means(floats, self.samples if total else 1, self._group))
        result = {}
        for name, buffer in buffers.items():
            if buffer.is_floating_point():
                result[name] = next(averages)
            else:
                # num_batches_tracked: a rank without samples counted fewer.
                result[name] = buffer.clone()
                dist.all_reduce(result[name], op=dist.ReduceOp.MAX, group=self._group)
        return result

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the averaged statistics, and start counting at 0.

        For use before an evaluation. All ranks call it.
        """
        averaged = self.averaged()
        for name, buffer in self._buffers().items():
            buffer.copy_(averaged[name])
        self.samples = 0

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}" if name else key: buffer
            for name, layer in self._layers.items()
            for key, buffer in layer.named_buffers(recurse=False)
        }

    def own_state(self) -> dict[str, object]:
        """This rank's own statistics on the CPU, to continue exactly in the same world."""
        buffers = self._buffers().items()
        return {
            "samples": self.samples,
            "buffers": {name: buffer.detach().cpu().clone() for name, buffer in buffers},
        }

    @torch.no_grad()
    def load_own_state(self, state: dict[str, object]) -> None:
        """Restore the result of ``own_state`` of the same rank in the same world."""
        buffers = state["buffers"]
        assert isinstance(buffers, dict)
        for name, buffer in self._buffers().items():
            buffer.copy_(buffers[name])
        self.samples = int(str(state["samples"]))


def weighted_means(
    buffers: Sequence[Tensor], weight: int, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """The buffers' means over the ranks, which all call it, weighted by their numbers ``weight``.

    The mean of statistics that are the same on all ranks is the same number, so that a second one
    changes nothing: whole numbers are the weights, not parts of 1, and it is computed in float64.
    """
    flat = torch.cat([buffer.double().flatten() for buffer in buffers])
    sums = torch.cat([flat * weight, flat.new_full((1,), weight)])
    dist.all_reduce(sums, group=group)
    parts = torch.split(sums[:-1] / sums[-1], [buffer.numel() for buffer in buffers])
    pairs = zip(parts, buffers, strict=True)
    return [part.to(buffer.dtype).view_as(buffer) for part, buffer in pairs]
