"""What the ways of exchanging gradients cost in accuracy: ResNet-18 on CIFAR-10, several seeds.

    torchrun --nproc-per-node 2 benchmarks/links_accuracy.py DATA.npz --json accuracy.json
    # with other settings than those of --comm, each of them a way of its own
    torchrun --nproc-per-node 2 benchmarks/links_accuracy.py DATA.npz \\
        --ways local:32,local:32+delay=0,local:32+epochs=12,powersgd+rank=8+exact=100

DATA is an .npz archive or the folder of torchvision's CIFAR10. All ways have the same global batch,
epochs and seeds, as far as their settings do not differ. Each rank counts as a node, so that bf16
has a link to cross; the links are as fast as this host, since only the accuracy is looked at.
``--limit-seconds`` leaves out what is not reached.
"""

import argparse
import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.cifar10 import MEAN, STD, load_cifar10
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import ResidentImages, Trainer, World, init_distributed
from ddp_slurm.training.links import wrap
from ddp_slurm.training.links.choice import steps_of_delay
from ddp_slurm.training.links.local_steps import LocalConfig
from ddp_slurm.training.links.wrap import POWERSGD_EXACT_STEPS, POWERSGD_RANK

OUTER = ("outer_lr", "outer_momentum")

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("data")
parser.add_argument("--ways", default="exact,bf16,powersgd,local:8,local:32")
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--global-batch-size", type=int, default=1024)
parser.add_argument("--lr", type=float, default=0.4, help="at its highest")
parser.add_argument("--small", action="store_true", help="a small network")
parser.add_argument("--limit", type=int, help="only the first N images of each split")
parser.add_argument("--limit-seconds", type=float, default=570.0)
parser.add_argument("--json", type=Path)


def accuracy(
    world: World,
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    seed: int,
    options: argparse.Namespace,
) -> float:
    """Percent of the test images, after one training."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    network = small_resnet() if options.small else resnet18()
    model = to_channels_last(network).to(world.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        ResidentImages(images, labels, world.device, mean=MEAN, std=STD, augment=True, seed=seed),
        global_batch=options.global_batch_size,
        total_epochs=options.epochs,
        seed=seed,
        quiet=True,
    )

    def warm_up_then_fall(step: int) -> float:
        done = trainer.progress
        return min(0.1 + 4.5 * done, 1.25 * (1 - done))

    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_fall)
    trainer.train()
    world.local_steps.clear()
    test = ResidentImages(test_images, test_labels, world.device, mean=MEAN, std=STD)
    return 100 * trainer.evaluate(test)["accuracy"]


def settings_of(way: str, options: argparse.Namespace) -> argparse.Namespace:
    """The options for this way, after what it sets has been set in the package."""
    comm, *changes = way.split("+")
    os.environ["DDP_SLURM_COMM"] = comm
    numbers = {name: float(number) for name, number in (one.split("=") for one in changes)}
    changed = argparse.Namespace(**vars(options))
    changed.epochs = int(numbers.pop("epochs", options.epochs))
    changed.lr = numbers.pop("lr", options.lr)
    wrap.POWERSGD_RANK = int(numbers.pop("rank", POWERSGD_RANK))
    wrap.POWERSGD_EXACT_STEPS = int(numbers.pop("exact", POWERSGD_EXACT_STEPS))
    local: dict[str, Any] = {name: numbers.pop(name) for name in OUTER if name in numbers}
    if "delay" in numbers:
        local["delay"] = int(numbers.pop("delay"))
    if numbers:
        raise SystemExit(f"--ways {way}: unknown settings {', '.join(numbers)}")
    changed_module: Any = wrap
    changed_module.LocalConfig = functools.partial(LocalConfig, **local)
    if "delay" in local:
        changed_module.steps_of_delay = lambda *measured: local["delay"]
    else:
        changed_module.steps_of_delay = steps_of_delay
    return changed


def main() -> None:
    options = parser.parse_args()
    os.environ["GROUP_RANK"] = os.environ["RANK"]  # torchrun's name of the node's number
    torch.backends.cudnn.benchmark = True
    started = time.monotonic()
    found: dict[str, list[float]] = {way: [] for way in options.ways.split(",")}
    with init_distributed() as world:
        data = load_cifar10(options.data, options.limit)
        for seed in range(options.seeds):
            for way in found:
                is_late = [time.monotonic() - started > options.limit_seconds]
                dist.broadcast_object_list(is_late, src=0, group=world.control)
                if is_late[0]:
                    continue
                found[way].append(accuracy(world, data, seed, settings_of(way, options)))
                if world.rank == 0:
                    at = time.monotonic() - started
                    print(f"{at:5.0f} s  seed {seed} {way}: {found[way][-1]:.2f} %", flush=True)
        if world.rank == 0:
            report(found, options)


def report(found: dict[str, list[float]], options: argparse.Namespace) -> None:
    for way, values in found.items():
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.fmean(values)
            print(f"{way:24} {mean:.2f} % ± {spread:.2f} ({len(values)} seeds)", flush=True)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "accuracy": found}) + "\n")


if __name__ == "__main__":
    main()
