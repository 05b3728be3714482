"""What an all-reduce reaches between two nodes, and between the ranks of one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from ddp_slurm.exchange import Link
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.uneven.calibrate import wait_for_device

FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
ENOUGH_SECONDS = 0.2
"""A buffer whose all-reduce took this long is not made larger."""
REPEATS = 3
MOST_NODES_IN_PAIRS = 6
"""With more nodes each is measured with the first one and with the next one only."""


@dataclass(frozen=True)
class Ring:
    """Ranks whose all-reduce is timed."""

    ranks: tuple[int, ...]
    nodes: tuple[int, int]
    """The numbers of the two nodes, equal for the ranks inside one."""


def rings_of(node_ranks: Sequence[int]) -> list[Ring]:
    """What is measured, in order: first inside the nodes, then between their first ranks.

    Args:
        node_ranks: the number of each rank's node.
    """
    members = dict(zip(sorted(set(node_ranks)), Layout.of(node_ranks).nodes, strict=True))
    inside = [Ring(ranks, (node, node)) for node, ranks in members.items() if len(ranks) > 1]
    pairs = list(combinations(members, 2))
    if len(members) > MOST_NODES_IN_PAIRS:
        pairs = [(one, other) for one, other in pairs if one == 0 or other == one + 1]
    between = [Ring((members[one][0], members[other][0]), (one, other)) for one, other in pairs]
    return inside + between


def measure_links(
    rings: Sequence[Ring], device: torch.device, control: dist.ProcessGroup
) -> list[Link]:
    """One Link for each ring, the same list on every rank. All ranks call it.

    The rings are measured one after another: they may share a switch.
    """
    found: list[Link | None] = []
    for ring in rings:
        group = dist.new_group(list(ring.ranks), timeout=timedelta(seconds=120))
        link = None
        if dist.get_rank() in ring.ranks:
            assert isinstance(group, dist.ProcessGroup)  # not a member: a number
            link = measure_ring(group, device)
            dist.destroy_process_group(group)
        found.append(link)
        dist.barrier(group=control)
    of_ranks = all_gather_values(found, control)
    return [Link(*of_ranks[ring.ranks[0]][index]) for index, ring in enumerate(rings)]


def measure_ring(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Bandwidth and latency that explain the group's all-reduce. All ranks of it call this."""

    def seconds_of(size: int) -> float:
        buffer = torch.zeros(size // 4, device=device)
        return seconds_of_slowest(partial(dist.all_reduce, buffer, group=group), device, group)

    members = dist.get_world_size(group)
    seconds_of(4)  # the first one connects the ranks
    empty = min(seconds_of(4) for _ in range(2 * REPEATS))
    size = FIRST_BYTES
    while True:
        seconds = seconds_of(size)
        if seconds > ENOUGH_SECONDS or size >= MOST_BYTES:
            break
        size *= 4
    again = [seconds_of(size) for _ in range(REPEATS - 1)]
    seconds = min(seconds, *again) - empty
    sent = 2 * (members - 1) / members * size
    return Link(sent / max(seconds, 1e-9), empty / (2 * (members - 1)))


def seconds_of_slowest(
    work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Of the ranks of ``group``, which begin together; the same number on all of them."""
    clock = torch.zeros(1, dtype=torch.float64, device=device)
    dist.all_reduce(clock, group=group)
    clock.item()  # all have arrived
    started = time.perf_counter()
    work()
    wait_for_device(device)
    clock.fill_(time.perf_counter() - started)
    dist.all_reduce(clock, op=dist.ReduceOp.MAX, group=group)
    return clock.item()
