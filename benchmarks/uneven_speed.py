"""Speed of uneven ranks together: an equal and a balanced split, and the sum of the ranks alone.

    torchrun --nproc-per-node 2 -m benchmarks.uneven_speed --slow 1,2
    # on CPUs (gloo):
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.uneven_speed --slow 1,3

``--slow`` makes a rank about k times slower by running each part of the network k times on each
batch. All figures come from one run, in alternation; each ratio is a line. The theory for an equal
split is world size * slowest / sum.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.workloads import Repeated
from ddp_slurm.examples.cifar10 import MEAN, STD
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import ResidentImages, Trainer, World, equal_shares, init_distributed
from ddp_slurm.training.exchange import all_gather_values, broadcast_value
from ddp_slurm.training.trainer.precision import choose_precision
from ddp_slurm.training.uneven.calibrate import TrainingStep, wait_for_device
from ddp_slurm.training.uneven.measured_shares import measured_shares

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--slow", default="1,2", help="how many times slower each rank is, whole numbers"
)
parser.add_argument(
    "--batch-size", type=int, help="per rank on average; default 512 on a GPU, 32 on a CPU"
)
parser.add_argument("--steps", type=int, help="per measurement; default 100 on a GPU, 10 on a CPU")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--precision", default="auto")


def rate_together(
    world: World, model: nn.Module, data: ResidentImages, shares: list[int], precision: str
) -> float:
    """Images a second of all ranks in the Trainer, the start left out."""
    rates: list[float] = []

    def note(record: dict[str, object]) -> None:
        rates.append(float(str(record["images_per_second"])))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        data,
        global_batch=sum(shares),
        shares=shares,
        total_epochs=1,
        precision=precision,
        recorders=[note],
        quiet=True,
        log_every_steps=max(1, len(data) // sum(shares) // 5),  # a record waits for the GPU
    )
    trainer.train()
    result = statistics.median(rates[1:]) if rates else 0.0
    return float(broadcast_value(result, world.control))


def rate_alone(
    world: World, model: nn.Module, data: ResidentImages, share: int, steps: int, precision: str
) -> float:
    """Images a second of this rank by itself, all ranks working at once, as in training."""
    computing = choose_precision(precision, world.ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spans = [(0, share)] * (steps + 3)
    dist.barrier(group=world.control)
    started = 0.0
    for index, (images, labels) in enumerate(data.batches(torch.arange(share), spans, epoch=0)):
        if index == 3:
            wait_for_device(world.device)
            started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with computing.autocast():
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    wait_for_device(world.device)
    return steps * share / (time.perf_counter() - started)


def main() -> None:
    arguments = parser.parse_args()
    with init_distributed() as world:
        gpu = world.device.type == "cuda"
        factors = [int(word) for word in arguments.slow.split(",")]
        if len(factors) != world.world_size:
            parser.error(
                f"--slow {arguments.slow} is for {len(factors)} ranks, "
                f"this world has {world.world_size}"
            )
        batch = arguments.batch_size or (512 if gpu else 32)
        steps = arguments.steps or (100 if gpu else 10)
        global_batch = batch * world.world_size
        torch.manual_seed(0)
        samples = global_batch * steps
        images = torch.randint(0, 256, (samples, 32, 32, 3), dtype=torch.uint8)
        labels = torch.randint(0, 10, (samples,))
        data = ResidentImages(images, labels, world.device, mean=MEAN, std=STD, augment=True)
        model = to_channels_last(resnet18() if gpu else small_resnet()).to(world.device)
        model.stem, *blocks = (
            Repeated(part, factors[world.rank]) for part in (model.stem, *model.stages)
        )
        model.stages = nn.Sequential(*blocks)
        precision = choose_precision(arguments.precision, world.ranks)
        equal = equal_shares(global_batch, world.world_size)

        def first_samples(count: int) -> tuple[Tensor, Tensor]:
            return next(data.batches(torch.arange(count) % samples, [(0, count)], epoch=0))

        step = TrainingStep(model, cross_entropy, first_samples, world.device, precision.autocast)

        measured: list[tuple[float, float, float, float]] = []
        balanced: list[int] = []
        for _ in range(arguments.rounds):
            alone = rate_alone(world, model, data, batch, steps, arguments.precision)
            own = all_gather_values(alone, world.control)
            balanced = measured_shares(step, global_batch, world.control).shares
            at_equal = rate_together(world, model, data, equal, arguments.precision)
            at_balanced = rate_together(world, model, data, balanced, arguments.precision)
            measured.append(
                (sum(own), world.world_size * min(own) / sum(own), at_equal, at_balanced)
            )
        if world.rank == 0:
            total, theory, at_equal, at_balanced = (
                statistics.median(column) for column in zip(*measured, strict=True)
            )
            device = torch.cuda.get_device_name() if gpu else "cpu"
            what = f"{precision.name}, slower by {factors}, global batch {global_batch}"
            print(f"{world.world_size} x {device}, {what}")
            print(f"sum of the ranks' own throughputs: {total:,.0f} images/s")
            print(f"equal split {equal}: {at_equal:,.0f} images/s")
            print(f"balanced split {balanced}: {at_balanced:,.0f} images/s")
            print(f"equal / sum: {at_equal / total:.3f} (theory {theory:.3f})")
            print(f"balanced / sum: {at_balanced / total:.3f}")
            print(f"balanced / equal: {at_balanced / at_equal:.3f}")


if __name__ == "__main__":
    main()
