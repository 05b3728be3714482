"""Final accuracy on CIFAR-10 with each way of exchanging gradients (``--comm``), over some seeds.

    # on each node N of two; what is rounded to bf16 is what crosses from one to the other
    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 --master-addr HOST \\
      benchmarks/links_accuracy.py DATA [--ways exact,local:8] [--seeds 3]

Same data, global batch, epochs and learning rates for all. All ways of one seed run before the
next seed, in one process; with ``--limit`` no run begins that would probably not end in time. DATA
is as for the example: an .npz archive or torchvision's folder.
"""

import argparse
import os
import statistics
import time

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.console import table
from ddp_slurm.examples.cifar10 import MEAN, STD, load_cifar10
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.job_env import COMM
from ddp_slurm.training import ResidentImages, Trainer, World, init_distributed

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("data", help="folder or .npz archive of CIFAR-10")
parser.add_argument("--ways", default="exact,bf16,powersgd,local:8,local:32")
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--global-batch-size", type=int, default=512)
parser.add_argument("--images", type=int, help="only the first N of each split")
parser.add_argument("--limit", type=float, help="seconds for all runs; default: none")


class Data:
    """CIFAR-10 on the rank's device."""

    def __init__(self, path: str, images: int | None, device: torch.device) -> None:
        train_images, train_labels, test_images, test_labels = load_cifar10(path, images)
        self.train = ResidentImages(
            train_images, train_labels, device, mean=MEAN, std=STD, augment=True
        )
        self.test = ResidentImages(test_images, test_labels, device, mean=MEAN, std=STD)


def accuracy(world: World, data: Data, way: str, seed: int, options: argparse.Namespace) -> float:
    """Of the test images after the training, in percent."""
    os.environ[COMM] = way
    torch.manual_seed(seed)
    on_gpu = world.device.type == "cuda"
    model = to_channels_last(resnet18() if on_gpu else small_resnet()).to(world.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=on_gpu
    )
    data.train.seed = seed
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data.train,  # no evaluation before the end: it would be an average more for local steps
        global_batch=options.global_batch_size,
        total_epochs=options.epochs,
        seed=seed,
        quiet=True,
    )
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(0.1 + 4.5 * trainer.progress, 1.25 * (1 - trainer.progress))
    )
    trainer.train()
    found = 100 * trainer.evaluate(data.test)["accuracy"]
    world.local_steps.clear()
    return found


def main() -> None:
    options = parser.parse_args()
    ways = options.ways.split(",")
    found: dict[str, list[float]] = {way: [] for way in ways}
    torch.backends.cudnn.benchmark = True
    with init_distributed() as world:
        data = Data(options.data, options.images, world.device)
        started, longest = time.monotonic(), 0.0
        for seed in range(options.seeds):
            for way in ways:
                begun = time.monotonic() - started
                left = torch.tensor((options.limit or 1e9) - begun - longest)
                torch.distributed.broadcast(left, 0, group=world.control)
                if left < 0:
                    continue
                found[way].append(accuracy(world, data, way, seed, options))
                longest = max(longest, time.monotonic() - started - begun)
                if world.rank == 0:
                    print(f"{begun:5.0f} s  seed {seed}, {way}: {found[way][-1]:.2f} %", flush=True)
        if world.rank == 0:
            print_table(found)


def print_table(found: dict[str, list[float]]) -> None:
    rows: list[tuple[str, ...]] = [("way", "accuracy %", "spread", "seeds", "against the first")]
    first = statistics.mean(next(iter(found.values())) or [0.0])
    for way, values in found.items():
        if values:
            mean = statistics.mean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            numbers = (f"{mean:.2f}", f"{spread:.2f}", str(len(values)), f"{mean - first:+.2f}")
            rows.append((way, *numbers))
    print(table(rows))


if __name__ == "__main__":
    main()
