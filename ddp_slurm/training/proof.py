"""``python -m ddp_slurm.training.proof``: each rank's card computes, all ranks reduce.

Run by ``ddp-slurm cluster install --python`` and ``ddp-slurm doctor --via srun`` as one step over
all nodes. Prints a line for each rank and the bandwidth of an all-reduce. Exit status 1 where a
card computes nothing, or a rank sees none: then the all-reduce, by gloo, checks the network alone.
"""

import sys
import time

import torch
import torch.distributed as dist

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.process_group import World, init_distributed
from ddp_slurm.training.uneven.calibrate import wait_for_device

COMPUTES = " computes"
NO_GPU = "no GPU: torch sees none"
SIDE = 512
BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
"""Of one all-reduce; large enough that its start does not count."""
REPEATS = 3


def main() -> int:
    try:
        with init_distributed() as world:
            return prove(world)
    except DdpSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def prove(world: World) -> int:
    """Compute on every rank's device, reduce over all; rank 0 prints. Returns the exit status."""
    lines: list[str] = all_gather_values(_compute(world.device), world.control)
    for fact, line in zip(world.ranks, lines, strict=True):
        _print(world, f"{fact.place}: {line}")
    failed = [line for line in lines if not line.endswith(COMPUTES)]
    if any(line != NO_GPU for line in failed):
        return 1  # NCCL would wait for the card
    if world.world_size > 1:
        _print(
            world,
            f"all-reduce over {world.world_size} ranks with {world.backend}: "
            f"{_bus_bandwidth(world) / 1e9:.2f} GB/s on each link",
        )
    return 1 if failed else 0


def _print(world: World, line: str) -> None:
    if world.rank == 0:
        print(line, flush=True)


def _compute(device: torch.device) -> str:
    """A product of two matrices whose result is known, as a line: what computed, or an error."""
    if device.type != "cuda":
        return NO_GPU
    try:
        ones = torch.ones(SIDE, SIDE, device=device)
        total = float((ones @ ones).sum())
    except RuntimeError as error:
        return f"{device} fails: {str(error).splitlines()[0]}"
    if total != SIDE**3:
        return f"{device} fails: the result is {total:g}, expected {SIDE**3}"
    return f"{device}, {torch.cuda.get_device_name(device)}{COMPUTES}"


def _bus_bandwidth(world: World) -> float:
    """Bytes per second that each link carries in the fastest of a few all-reduces.

    In a ring each rank sends 2 (n - 1) / n times the data. Source: github.com/NVIDIA/nccl-tests,
    doc/PERFORMANCE.md.
    """
    size = BYTES[world.device.type]
    data = torch.zeros(size // 4, device=world.device)
    fastest = float("inf")
    for _ in range(REPEATS + 1):  # the first one connects the ranks
        dist.barrier(group=world.control)
        start = time.perf_counter()
        dist.all_reduce(data)
        wait_for_device(world.device)
        fastest = min(fastest, time.perf_counter() - start)
    return size * 2 * (world.world_size - 1) / world.world_size / fastest


if __name__ == "__main__":
    sys.exit(main())
