"""Images a second on one GPU by where the images come from: on the card, streamed, a DataLoader.

    torchrun --nproc-per-node 1 -m benchmarks.input_path
    torchrun --nproc-per-node 1 -m benchmarks.input_path --folder /scratch --gigabytes 20

The streamed images are those of a file on a local disk (``--folder``), mapped into memory: after it
was written it is in the page cache as far as the memory goes. The DataLoader loop is that of
cifar10_throughput.py: torchvision's transforms, six workers, fp32.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.cifar10_throughput import network, usual_rate
from ddp_slurm.console import table
from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.examples.models import to_channels_last
from ddp_slurm.training import (
    ResidentImages,
    Source,
    StreamedImages,
    Trainer,
    World,
    init_distributed,
)

IMAGE_BYTES = 32 * 32 * 3

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--batches", default="1024,2048", help="batch sizes")
parser.add_argument("--steps", type=int, help="per measurement; default 90 on a GPU, 6 on a CPU")
parser.add_argument("--gigabytes", type=float, help="of the file; default as many as are used")
parser.add_argument("--folder", type=Path, help="for the file; default a temporary one")
parser.add_argument("--workers", type=int, default=6, help="of the DataLoader")


def write_images(folder: Path, count: int) -> torch.Tensor:
    """Random images in a file, mapped."""
    path = folder / "images.npy"
    file = np.lib.format.open_memmap(path, "w+", np.uint8, (count, 32, 32, 3))
    for start in range(0, count, 100_000):
        part = file[start : start + 100_000]
        part[:] = np.random.default_rng(start).integers(0, 256, part.shape, np.uint8)
    file.flush()
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def rate(world: World, data: Source, batch: int, steps: int) -> float:
    """The median over tenths of an epoch, the first two left out."""
    model = to_channels_last(network(world)).to(world.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    rates: list[float] = []
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=batch,
        total_epochs=1,
        quiet=True,
        log_every_steps=max(1, steps // 10),
        recorders=[lambda record: rates.append(record["images_per_second"])],
    )
    trainer.train()
    return statistics.median(rates[2:])


def main() -> None:
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = [("batch", "on the card", "streamed", "DataLoader", "", "")]
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        init_distributed() as world,
    ):
        gpu = world.device.type == "cuda"
        torch.backends.cudnn.benchmark = True
        steps = arguments.steps or (90 if gpu else 6)
        sizes = [int(size) for size in arguments.batches.split(",")] if gpu else [64]
        most = int((arguments.gigabytes or 0) * 1e9) // IMAGE_BYTES
        images = write_images(Path(name), max(most, max(sizes) * steps))
        labels = torch.randint(0, 10, (len(images),))
        options = {"mean": MEAN, "std": STD, "augment": True}
        for batch in sizes:
            used = batch * steps
            on_card = ResidentImages(images[:used], labels[:used], world.device, **options)
            resident = rate(world, on_card, batch, steps)
            every = len(images) // used
            spread = StreamedImages(images[::every][:used], labels[:used], world.device, **options)
            streamed = rate(world, spread, batch, steps)
            usual = usual_rate(world, batch, min(steps, 30), arguments.workers) or float("nan")
            cells = (f"{value:,.0f}" for value in (resident, streamed, usual))
            parts = f"streamed / card {streamed / resident:.3f}", f"/ loader {streamed / usual:.2f}"
            rows.append((str(batch), *cells, *parts))
        if world.rank == 0:
            print(table(rows))


if __name__ == "__main__":
    main()
