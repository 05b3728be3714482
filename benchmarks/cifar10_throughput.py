"""Images a second of the Trainer on CIFAR-10 shapes: one rank, all ranks, and a DataLoader loop.

    torchrun --nproc-per-node 2 benchmarks/cifar10_throughput.py
    torchrun --nproc-per-node 2 benchmarks/cifar10_throughput.py --precision fp32 --batch-size 256
    torchrun --nproc-per-node 2 benchmarks/cifar10_throughput.py --model lenet --batch-size 256

The DataLoader loop is the usual one: torchvision's transforms in a DataLoader with six workers,
DistributedSampler, DDP, fp32. It is left out if torchvision is not installed. The images are
random: the speed is that of the real ones.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.examples.models import lenet, resnet18, small_resnet, to_channels_last
from ddp_slurm.training import (
    ResidentImages,
    Trainer,
    World,
    equal_shares,
    init_distributed,
)

MODELS = {"small": small_resnet, "resnet18": resnet18, "lenet": lenet}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--batch-size", type=int, help="per rank; default 512 on a GPU, 32 on a CPU")
parser.add_argument("--steps", type=int, help="per measurement; default 90 on a GPU, 10 on a CPU")
parser.add_argument(
    "--model", choices=MODELS, default="", help="default resnet18 on a GPU, small on a CPU"
)
parser.add_argument("--precision", default="auto")
parser.add_argument(
    "--workers", type=int, default=6, help="of the usual loop's DataLoader, per rank"
)
parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
LINE = "images/s of one rank: "


def network(world: World, name: str = "") -> nn.Module:
    """``name`` of MODELS; without it a ResNet that suits the device."""
    torch.manual_seed(0)
    return MODELS[name or ("resnet18" if world.device.type == "cuda" else "small")]()


def trainer_rate(world: World, name: str, batch: int, steps: int, precision: str) -> float:
    """The median over tenths of an epoch, the first two left out; on rank 0."""
    samples = batch * world.world_size * steps
    images = torch.randint(0, 256, (samples, 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(0, 10, (samples,))
    data = ResidentImages(images, labels, world.device, mean=MEAN, std=STD, augment=True)
    model = to_channels_last(network(world, name)).to(world.device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.01,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
        fused=world.device.type == "cuda",
    )
    rates: list[float] = []
    Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=batch * world.world_size,
        shares=equal_shares(batch * world.world_size, world.world_size),
        total_epochs=1,
        precision=precision,
        quiet=True,
        log_every_steps=max(1, steps // 10),
        recorders=[lambda record: rates.append(record["images_per_second"])],
    ).train()
    return statistics.median(rates[2:]) if rates else 0.0


def usual_rate(world: World, batch: int, steps: int, workers: int, name: str = "") -> float | None:
    """The loop of the tutorials; None without torchvision."""
    try:
        from torchvision import transforms
    except ImportError:
        return None

    class Images(Dataset[tuple[torch.Tensor, int]]):
        images = torch.randint(0, 256, (4096, 3, 32, 32), dtype=torch.uint8)
        change = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
            ]
        )

        def __len__(self) -> int:
            return batch * world.world_size * steps

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return self.change(self.images[index % len(self.images)]), index % 10

    dataset = Images()
    gpu = world.device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch,
        sampler=DistributedSampler(dataset),
        num_workers=workers if gpu else 0,
        pin_memory=gpu,
    )
    model = nn.parallel.DistributedDataParallel(network(world, name).to(world.device))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    skipped, started = steps // 5, 0.0
    for index, (images, labels) in enumerate(loader):
        if index == skipped:
            if gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(images.to(world.device)), labels.to(world.device)).backward()
        optimizer.step()
    if gpu:
        torch.cuda.synchronize()
    return (steps - skipped) * batch * world.world_size / (time.perf_counter() - started)


def rate_of_one_rank() -> float:
    """Of a world of one rank in its own process, on the first GPU, before the other ranks meet."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "GROUP_"))
    }
    environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29871",
    }
    run = subprocess.run(
        [sys.executable, *sys.argv, "--alone"],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    [line] = [line for line in run.stdout.splitlines() if line.startswith(LINE)]
    return float(line.removeprefix(LINE))


def main() -> None:
    arguments = parser.parse_args()
    one = rate_of_one_rank() if not arguments.alone and os.environ.get("RANK") == "0" else 0.0
    with init_distributed(rendezvous_seconds=600) as world:
        gpu = world.device.type == "cuda"
        torch.backends.cudnn.benchmark = True
        batch, steps = (
            arguments.batch_size or (512 if gpu else 32),
            arguments.steps or (90 if gpu else 10),
        )
        together = trainer_rate(world, arguments.model, batch, steps, arguments.precision)
        if arguments.alone:
            print(f"{LINE}{together}")
            return
        usual = usual_rate(world, batch, steps, arguments.workers, arguments.model)
        dist.barrier(group=world.control)
        if world.rank == 0:
            device = torch.cuda.get_device_name() if gpu else "cpu"
            what = f"{arguments.model or 'ResNet'}, batch {batch} a rank"
            what += f", precision {arguments.precision}"
            print(f"{world.world_size} x {device}, {what}")
            print(f"Trainer, 1 rank: {one:,.0f} images/s")
            print(f"Trainer, {world.world_size} ranks: {together:,.0f} images/s")
            print(f"{world.world_size} ranks / 1 rank: {together / one:.3f}")
            if usual is None:
                print("the usual loop: left out, torchvision is not installed")
            else:
                print(f"the usual loop, {world.world_size} ranks: {usual:,.0f} images/s")
                print(f"Trainer / the usual loop: {together / usual:.3f}")


if __name__ == "__main__":
    main()
