"""Images as a Source: on the GPU, or streamed to it, and normalised and augmented there."""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from ddp_slurm.training.data import Batch, DataError, Span
from ddp_slurm.training.uneven.sampler import seed_of

SHIFT_PIXELS = 4
PREFETCH = 4
"""Batches that are on their way to the device, each gathered by a thread of its own."""


class _Images:
    """uint8 images with labels, of which whole batches are normalised and augmented.

    Args:
        images: uint8 (samples, height, width, channels).
        labels: class numbers, (samples,).
        mean, std: per channel, of images scaled to 0..1. A batch is (image / 255 - mean) / std.
        augment: shift by up to 4 pixels with reflected borders, and mirror half of the images.
        seed: of the augmentation.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        device: torch.device,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool = False,
        seed: int = 0,
    ) -> None:
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images for {len(labels)} labels")
        channels = images.shape[-1]
        if not len(mean) == len(std) == channels:
            raise DataError(
                f"mean {list(mean)} and std {list(std)}: expected one number for each of "
                f"{channels} channels of images {list(images.shape)}"
            )
        self.device = device
        self.images = self._placed(images)
        self.labels = self._placed(labels.to(torch.int64))
        self.augment = augment
        self.seed = seed
        scale = 255 * torch.tensor(std, device=device)
        self._factor = 1 / scale
        self._offset = -255 * torch.tensor(mean, device=device) / scale

    def __len__(self) -> int:
        return len(self.labels)

    def _placed(self, samples: Tensor) -> Tensor:
        """The samples where they are kept."""
        return samples

    def _normalised(self, images: Tensor) -> Tensor:
        # This view of (samples, height, width, channels) is a channels_last tensor already:
        # the layout that tensor cores are fast with.
        return (images * self._factor + self._offset).permute(0, 3, 1, 2)

    def _moves(self, epoch: int) -> Tensor:
        """Of each sample, how it is moved in this epoch: see ``move``; int64 (samples, 2)."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, "augment"))
        # The third column is not used; without it the samples of a seed would move otherwise.
        shifts = torch.randint(-SHIFT_PIXELS, SHIFT_PIXELS + 1, (len(self), 3), generator=generator)
        mirrored = torch.randint(0, 2, (len(self),), generator=generator)
        return move(shifts[:, 0], shifts[:, 1], mirrored)


class ResidentImages(_Images):
    """uint8 images that fit on the device, normalised and augmented there, a whole batch at once.

    A batch is float32 (samples, channels, height, width) and int64 (samples,). The augmentation of
    a sample depends on seed, epoch and sample only: not on its rank, and not on a resume.
    """

    def _placed(self, samples: Tensor) -> Tensor:
        return samples.to(self.device)

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        order = order.to(self.device)
        labels = self.labels[order]
        moves = self._moves(epoch).to(self.device)[order] if self.augment else None
        for start, stop in spans:
            chosen = order[start:stop]
            if moves is None:
                images = self.images[chosen]
            else:
                images = moved(self.images, chosen, moves[start:stop])
            yield self._normalised(images), labels[start:stop]


class StreamedImages(_Images):
    """uint8 images that do not fit on the device: the same batches as those of ResidentImages.

    Threads gather the samples of the next batches into pinned memory while the device computes;
    the device normalises and augments whole batches. So a rank needs no worker processes, and a
    sample takes one byte a channel on its way.

    The images may be in a file on a local disk: ``torch.from_numpy(np.load("images.npy",
    mmap_mode="c"))``.
    """

    def batches(self, order: Tensor, spans: Sequence[Span], epoch: int) -> Iterator[Batch]:
        sources = [self.images, self.labels]
        if self.augment:
            sources.append(self._moves(epoch))
        coming: deque[Future[list[Tensor]]] = deque()
        rest = iter(spans)
        pool = ThreadPoolExecutor(PREFETCH, initializer=self._use_device)
        try:
            for start, stop in islice(rest, PREFETCH):
                coming.append(pool.submit(self._gathered, sources, order[start:stop]))
            while coming:
                gathered = coming.popleft().result()
                for start, stop in islice(rest, 1):
                    coming.append(pool.submit(self._gathered, sources, order[start:stop]))
                yield self._on_device(gathered)
        finally:  # also where the epoch is left early
            pool.shutdown(cancel_futures=True)

    def _use_device(self) -> None:
        """Pinned memory belongs to a thread's current GPU, which is the first one by default."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _gathered(self, sources: Sequence[Tensor], chosen: Tensor) -> list[Tensor]:
        """The chosen rows of each source in memory that the device can copy by itself."""
        parts = []
        for source in sources:
            shape = (len(chosen), *source.shape[1:])
            rows = torch.empty(shape, dtype=source.dtype, pin_memory=self.device.type == "cuda")
            parts.append(torch.index_select(source, 0, chosen, out=rows))
        return parts

    def _on_device(self, gathered: Sequence[Tensor]) -> Batch:
        images, labels, *moves = (part.to(self.device, non_blocking=True) for part in gathered)
        if moves:
            images = moved(images, torch.arange(len(images), device=self.device), moves[0])
        return self._normalised(images), labels


def move(down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """Shifts (-4..4 pixels) and whether mirrored (0, 1), of each sample, as rows of ``_places``."""
    shifts = 2 * SHIFT_PIXELS + 1
    return torch.stack([down + SHIFT_PIXELS, mirrored * shifts + right + SHIFT_PIXELS], dim=1)


def moved(images: Tensor, chosen: Tensor, moves: Tensor) -> Tensor:
    """Chosen images, shifted and mirrored. Each pixel is looked up: one gather, no padded copy.

    Few kernels: with a small model their launches are a large part of a step.

    Args:
        images: (samples, height, width, channels).
        chosen: their numbers, (n,).
        moves: of each chosen one, as ``move`` returns them, int64 (n, 2).
    """
    row_places, column_places = _places(images.shape[1], images.shape[2], images.device)
    rows, columns = row_places[moves[:, 0]], column_places[moves[:, 1]]
    return images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]


@functools.cache
def _places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each move, which row of the image each row shows, (9, height), and which column each
    column shows, (18, width): unmirrored ones first."""
    shifts = torch.arange(-SHIFT_PIXELS, SHIFT_PIXELS + 1)[:, None]
    rows = _reflect(torch.arange(height) + shifts, height)
    columns = torch.arange(width)
    either_way = [_reflect(each + shifts, width) for each in (columns, columns.flip(0))]
    return rows.to(device), torch.cat(either_way).to(device)


def _reflect(positions: Tensor, size: int) -> Tensor:
    positions = positions.abs()
    return torch.where(positions > size - 1, 2 * (size - 1) - positions, positions)
