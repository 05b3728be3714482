"""How far the predicted time of a step is from the measured one, over limited links. Needs root.

    python -m benchmarks.prediction [--labs N]

Each lab has a network namespace for each machine, joined by links of 50 to 200 Mbit/s (tc tbf).
A rank's compute is a sleep in proportion to its samples, so that the two cores of a small machine
are not the limit; its gradients are real, of 8 MB. Each lab is measured as ``ddp-slurm measure``
does it. Then every choice of machines trains with the shares that are best for it, and the table
has its step beside the predicted one, and how much slower the chosen one is than the best.
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import combinations
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.links_network import PORT, Machines, enter
from ddp_slurm.balance import split_batch
from ddp_slurm.console import table
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import PLAIN, Box, Network
from ddp_slurm.predict import fastest, predict
from ddp_slurm.training import World, init_distributed
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.measure.cards import measure_card
from ddp_slurm.training.measure.links import measure_links, rings_of
from ddp_slurm.training.measure.overlap import measure_hidden
from ddp_slurm.training.measure.run import gradient_bytes
from ddp_slurm.training.uneven.calibrate import TrainingStep

WIDTH, LAYERS = 500, 8
"""8 layers of a megabyte of gradients each."""
STEPS = 4


class Lab(NamedTuple):
    """Machines, in the order of ranks."""

    milliseconds: Sequence[Sequence[float]]
    """Of a sample, for each rank of each machine."""
    rate: str
    """Of every machine's link."""
    batch: int
    """Samples of a step over all ranks."""


LABS = (
    Lab(((1.0,), (2.0,)), "100mbit", 400),
    Lab(((4.0, 4.0), (8.0,)), "200mbit", 600),
    Lab(((2.0,), (4.0,), (3.0,)), "50mbit", 1200),
    Lab(((1.0, 1.0, 1.0), (5.0,)), "100mbit", 300),
)


class Sleep(torch.autograd.Function):
    """Sleeps once in forward and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """Takes so long for each sample, whatever is computed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.seconds = seconds / (3 * LAYERS)

    def forward(self, inputs: Tensor) -> Tensor:
        """One row of inputs for each sample; the arithmetic is that of one."""
        hidden = inputs[:1]
        for layer in self.layers:
            hidden = Sleep.apply(layer(hidden), self.seconds * len(inputs))  # type: ignore[no-untyped-call]
        return hidden


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(samples, WIDTH), torch.zeros(1, WIDTH)


def work(world: World, lab: Lab) -> list[dict[str, Any]]:
    """Measure, then train with each choice of machines. The same rows on every rank."""
    node = world.ranks[world.rank].node_rank
    torch.manual_seed(0)
    model = Sleeper(lab.milliseconds[node][world.env.local_rank or 0] / 1000)
    step = TrainingStep(model, mse_loss, batch_of, world.device)
    own = measure_card(step, world.control)
    points = all_gather_values(own.points, world.control)
    curves = [Curve.through([(n, seconds) for n, seconds in of_rank]) for of_rank in points]
    node_ranks = [fact.node_rank for fact in world.ranks]
    rings = rings_of(node_ranks)
    links = measure_links(rings, world.device, world.control)
    sizes = sorted(set.intersection(*({n for n, _ in of_rank} for of_rank in points)))
    size = gradient_bytes(model)
    hidden = measure_hidden(step, curves, sizes, size)
    by_names = {
        frozenset(map(str, ring.nodes)): link for ring, link in zip(rings, links, strict=True)
    }
    network = Network(size, by_names, ways=PLAIN)
    if hidden is not None:
        network = network._replace(hidden=hidden)
    members: dict[int, list[int]] = {}
    for rank, number in enumerate(node_ranks):
        members.setdefault(number, []).append(rank)
    boxes = {
        number: Box((str(number),), tuple((curves[rank], lab.batch) for rank in ranks))
        for number, ranks in members.items()
    }
    best = fastest(lab.batch, list(boxes.values()), network)
    rows = []
    for count in range(1, len(boxes) + 1):
        for choice in combinations(boxes, count):
            ranks = [rank for number in choice for rank in members[number]]
            shares = split_batch(lab.batch, [curves[rank] for rank in ranks])
            seconds = seconds_of_step(world, model, ranks, shares)
            step_of = predict(lab.batch, [boxes[number] for number in choice], network)
            names = tuple(map(str, choice))
            is_chosen = best is not None and best.names == names
            assert step_of is not None
            row = {"choice": names, "predicted": step_of.seconds, "seen": seconds}
            rows.append({**row, "chosen": is_chosen})
    return rows


def seconds_of_step(world: World, model: nn.Module, ranks: list[int], shares: list[int]) -> float:
    """The median of a few steps of these ranks; the same number on all ranks."""
    group = dist.new_group(ranks)
    found = []
    if world.rank in ranks:
        assert isinstance(group, dist.ProcessGroup)
        share = shares[ranks.index(world.rank)]
        ddp = DistributedDataParallel(model, process_group=group) if len(ranks) > 1 else model
        inputs, targets = batch_of(share)
        for _ in range(2 + STEPS):  # DDP settles its buckets in the first two
            dist.barrier(group=group)
            started = time.perf_counter()
            mse_loss(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
            found.append(time.perf_counter() - started)
            model.zero_grad()
        dist.barrier(group=group)
    everyone = all_gather_values(found[2:], world.control)
    steps = zip(*(of_rank for of_rank in everyone if of_rank), strict=True)
    return statistics.median(max(step) for step in steps)


def serve(namespace: str, environ: dict[str, str], pipe: Connection, lab: Lab) -> None:
    enter(namespace)
    os.environ.update(environ)
    torch.set_num_threads(1)
    with init_distributed(backend="gloo", timeout_seconds=120) as world:
        pipe.send(work(world, lab))


def limit(machines: Machines, rate: str) -> None:
    """With a burst that is small beside the gradients: a real link has none."""
    for machine, name in enumerate(machines.names):
        for namespace, device in ((name, "eth0"), (machines.switch, f"port{machine}")):
            shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape]
            subprocess.run(command, check=True)


def run(lab: Lab, port: int) -> list[dict[str, Any]]:
    tasks = [len(ranks) for ranks in lab.milliseconds]
    context = multiprocessing.get_context("fork")
    with Machines(len(tasks)) as machines:
        limit(machines, lab.rate)
        processes, pipes = [], []
        for machine, count in enumerate(tasks):
            for local_rank in range(count):
                environ = {
                    "RANK": str(len(processes)),
                    "WORLD_SIZE": str(sum(tasks)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "NODE_RANK": str(machine),
                    "MASTER_ADDR": machines.address(0),
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                mine, theirs = context.Pipe()
                arguments = (machines.names[machine], environ, theirs, lab)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
        rows: list[dict[str, Any]] = pipes[0].recv()
        for process in processes:
            process.join(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labs", type=int, default=len(LABS), help="only the first N labs")
    labs = LABS[: parser.parse_args().labs]
    lines: list[Sequence[str]] = [
        ("LAB", "LINK", "MACHINES", "PREDICTED MS", "SEEN MS", "OFF %", "")
    ]
    errors = []
    for number, lab in enumerate(labs):
        rows = run(lab, PORT + 100 + number)
        best = min(row["seen"] for row in rows)
        name = "+".join(str(len(ranks)) for ranks in lab.milliseconds)
        for row in rows:
            off = 100 * (row["predicted"] / row["seen"] - 1)
            errors.append(abs(off))
            note = f"chosen, {row['seen'] / best:.2f} of the best" if row["chosen"] else ""
            times = (f"{1000 * row['predicted']:.0f}", f"{1000 * row['seen']:.0f}", f"{off:+.1f}")
            lines.append((name, lab.rate, ",".join(row["choice"]), *times, note))
    print(table(lines))
    print(f"off by {statistics.median(errors):.1f} % in the median, {max(errors):.1f} % at most")


if __name__ == "__main__":
    main()
