"""Two cards of which one holds far less: no failure, both at work, the exact gradient.

    torchrun --nproc-per-node 2 -m benchmarks.memory
    # tiny, on CPUs (gloo), where no memory is limited:
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.memory --runs 2 --steps 12

The last rank's GPU is held to ``--gb`` by set_per_process_memory_fraction. The global batch is so
large that the equal share does not fit it at once. For each model: the search, so many runs of a
few steps of which the first two search and the others know the micro-batch as from a file of
speeds, E = images a second of both / the sum of the cards alone at their shares and micro-batches,
and the gradient beside that of one process. Exits non-zero if a run fails or a gradient differs.
"""

import argparse
import copy
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from benchmarks.workloads import NAMES, Workload, rate_alone, rate_of, trainer_of
from ddp_slurm.job_env import BALANCE, KNOWN_LIMITS
from ddp_slurm.training import Trainer, World, init_distributed
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.out_of_memory import free_memory, is_out_of_memory
from ddp_slurm.training.memory.search import largest_micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep, card_name

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--models", default=",".join(NAMES))
parser.add_argument("--gb", type=float, default=11.0, help="of the last rank's GPU")
parser.add_argument("--runs", type=int, default=20)
parser.add_argument("--steps", type=int, default=60, help="of the run whose speed is measured")
parser.add_argument("--most", type=int, help="samples that a search tries; default 8192, CPU 32")

ALLOWED = 1e-4
"""The largest relative difference of an fp32 gradient."""


def hold(world: World, gigabytes: float) -> None:
    """Give the last rank a small card."""
    if world.device.type == "cuda" and world.rank == world.world_size - 1:
        total = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total, world.device)


def searched(world: World, work: Workload, most: int) -> tuple[int, float]:
    """The micro-batch of this rank's card and the seconds of the search."""
    model = work.model().to(world.device)
    data = work.data(64, world.device)

    def batch(count: int) -> tuple[Tensor, Tensor]:
        return next(data.batches(torch.arange(count), [(0, count)], epoch=0))

    def autocast() -> torch.autocast:
        return torch.autocast(world.device.type, torch.bfloat16)

    optimizer = work.optimizer(model)
    step = TrainingStep(model, work.loss, batch, world.device, autocast, optimizer)
    started = time.perf_counter()
    found = largest_micro_batch(step, most)
    return found, time.perf_counter() - started


def runs_out(world: World, work: Workload, samples: int) -> bool:
    """Whether so many samples at once do not fit this rank's card."""
    model = work.model().to(world.device)
    inputs = work.data(samples, world.device).inputs
    try:
        with torch.autocast(world.device.type, torch.bfloat16):
            outputs = model(inputs)
        outputs.float().mean().backward()
        failed = False
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    del model, inputs
    free_memory(world.device)
    return failed


def frozen(model: nn.Module) -> nn.Module:
    """With fixed statistics: BatchNorm's own depend on how the batch is divided."""
    for layer in model.modules():
        if isinstance(layer, _NormBase):
            layer.eval()
    return model


def gradient_error(world: World, work: Workload, shares: list[int], most: int) -> float:
    """Relative difference of one step's fp32 gradient from that of this process with all samples.

    Args:
        shares: of all ranks.
        most: samples that this rank runs at once in fp32.
    """
    batch = sum(shares)
    base = frozen(work.model()).to(world.device)
    together = copy.deepcopy(base)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.0)
    options = {"shares": shares, "precision": "fp32", "micro_batch": most, "graphs": "off"}
    trainer = trainer_of(world, work, together, batch, 1, optimizer=optimizer, **options)
    trainer.train()
    data = work.data(batch, world.device)
    for part in torch.arange(batch).split(most):
        chosen = slice(int(part[0]), int(part[-1]) + 1)
        loss = work.loss(base(data.inputs[chosen]), data.targets[chosen])
        (loss * len(part) / batch).backward()  # type: ignore[no-untyped-call]
    found, expected = (
        torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
        for model in (together, base)
    )
    return float((found - expected).norm() / expected.norm())


def limits_of(trainer: Trainer) -> list[int]:
    return [int(n) for n in all_gather_values(trainer.split.micro_batch, trainer.world.control)]


def remember(work: Workload, world: World, trainer: Trainer) -> None:
    """As a job with a file of speeds tells its ranks; here each its own card."""
    known = [
        type(trainer.module).__name__,
        trainer.precision.name,
        {card_name(world.device): trainer.split.micro_batch},
    ]
    os.environ[KNOWN_LIMITS] = json.dumps(known)


def check(world: World, work: Workload, arguments: argparse.Namespace) -> bool:
    gpu = world.device.type == "cuda"
    most = arguments.most or (8192 if gpu else 32)
    own, seconds = searched(world, work, most)
    rows = all_gather_values([own, seconds], world.control)
    small = min(row[0] for row in rows)
    batch = 2 * 2 * small
    is_last = world.rank == world.world_size - 1
    out = bool(is_last and gpu and runs_out(world, work, batch // 2))
    finished, both, shares, limits = 0, 0.0, [0], [0]
    for number in range(arguments.runs):
        if number < 2:
            os.environ.pop(KNOWN_LIMITS, None)
        is_timed = number + 1 == arguments.runs
        steps = arguments.steps if is_timed else 3
        model = work.model().to(world.device)
        options: dict[str, Any] = {"log_every_steps": max(1, steps // 8)}
        if number >= 2:
            options["shares"] = shares
        trainer = trainer_of(world, work, model, batch, steps, **options)
        shares, limits = list(trainer.sampler.shares), limits_of(trainer)
        remember(work, world, trainer)
        rate = rate_of(world, trainer)
        both = rate if is_timed else both
        finished += 1
        del trainer, model
        free_memory(world.device)
    share, limit = shares[world.rank], limits[world.rank]
    alone_rate = rate_alone(world, work, work.model().to(world.device), share, limit, 20)
    free_memory(world.device)
    alone = all_gather_values(alone_rate, world.control)
    error = gradient_error(world, work, shares, max(2, limit // 4))
    free_memory(world.device)
    everyone = all_gather_values([out, error], world.control)
    if world.rank == 0:
        print(f"{work.name}: search {', '.join(f'{n} in {t:.1f} s' for n, t in rows)}")
        print(f"  global batch {batch}: an equal share at once runs out: {everyone[-1][0]}")
        print(f"  shares {shares}, micro-batches {limits}")
        print(f"  runs without a failure: {finished} of {arguments.runs}")
        e = both / sum(alone)
        print(f"  E {e:.3f}: {both:,.0f} of {sum(alone):,.0f} images/s")
        print(f"  gradient: relative difference {max(row[1] for row in everyone):.1e}", flush=True)
    return max(row[1] for row in everyone) < ALLOWED


def main() -> None:
    arguments = parser.parse_args()
    os.environ[BALANCE] = "measured"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    with init_distributed() as world:
        hold(world, arguments.gb)
        gpu = world.device.type == "cuda"
        good = [check(world, Workload(n, gpu), arguments) for n in arguments.models.split(",")]
        dist.barrier(group=world.control)
        if not all(good):
            sys.exit(1)


if __name__ == "__main__":
    main()
