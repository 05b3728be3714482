"""The labs of ``prediction.py`` that are run: a process for each rank, in its machine's namespace.

A rank's compute is a sleep in proportion to its samples, so that the cores of a small machine are
not the limit; its gradients are real.
"""

import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.links_network import PORT, Machines, enter
from benchmarks.prediction_labs import Lab, Ways
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import Link, Network
from ddp_slurm.training import World, init_distributed
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.measure.cards import measure_card
from ddp_slurm.training.measure.links import measure_links, rings_of
from ddp_slurm.training.measure.overlap import measure_hidden
from ddp_slurm.training.measure.run import gradient_bytes
from ddp_slurm.training.uneven.calibrate import TrainingStep

WIDTH, LAYERS = 500, 5
"""5 layers of a megabyte of gradients each."""
MOST_STEPS, SECONDS = 5, 3.0
"""Of each way: so many steps, or fewer where they take longer than that; two at least."""


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


def sleeper(world: World, lab: Lab) -> Sleeper:
    """Of this rank, whose machine's number in the lab its node name has."""
    torch.manual_seed(0)
    machine = int(os.environ["SLURMD_NODENAME"])
    return Sleeper(lab.milliseconds[machine][world.env.local_rank or 0] / 1000)


def measure(world: World, lab: Lab) -> tuple[list[Any], list[Any], float | None, int]:
    """As ``ddp-slurm measure``: points of every rank, links, the hidden part, gradient bytes."""
    model = sleeper(world, lab)
    step = TrainingStep(model, mse_loss, batch_of, world.device)
    own = measure_card(step, world.control)
    points = all_gather_values(own.points, world.control)
    rings = rings_of([fact.node_rank for fact in world.ranks])
    links = measure_links(rings, world.device, world.control)
    sizes = sorted(set.intersection(*({n for n, _ in of_rank} for of_rank in points)))
    curves = [curve_of(of_rank) for of_rank in points]
    hidden = measure_hidden(step, curves, sizes, gradient_bytes(model))
    found = [(ring.nodes, tuple(link)) for ring, link in zip(rings, links, strict=True)]
    return points, found, hidden, gradient_bytes(model)


def curve_of(points: Sequence[Sequence[float]]) -> Curve:
    return Curve.through([(int(n), seconds) for n, seconds in points])


def train(world: World, lab: Lab, shares: Sequence[int], ways: Ways) -> list[float]:
    """Seconds of a step in each way: ``--comm``, bytes of a bucket, seconds of compute."""
    inputs, targets = batch_of(shares[world.rank])
    medians = []
    for comm, bucket, compute in ways:
        os.environ["DDP_SLURM_COMM"] = comm
        os.environ["DDP_SLURM_BUCKET_BYTES"] = str(bucket or "")
        model: nn.Module = sleeper(world, lab)
        if world.world_size > 1:
            model = world.wrap(model, compute_seconds=compute)
        found = []
        for _ in range(1 + max(2, min(MOST_STEPS, int(SECONDS / compute)))):
            dist.barrier(group=world.control)
            started = time.perf_counter()
            mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            found.append(time.perf_counter() - started)
            model.zero_grad()
        everyone = all_gather_values(found[1:], world.control)
        medians.append(statistics.median(max(step) for step in zip(*everyone, strict=True)))
    return medians


def _serve(
    namespace: str,
    environ: dict[str, str],
    pipe: Connection,
    work: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    enter(namespace)
    os.environ.update(environ)
    torch.set_num_threads(1)
    with init_distributed(backend="gloo", timeout_seconds=120) as world:
        pipe.send(work(world, *arguments))


class LiveLab:
    """The machines of a lab. A context manager."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.machines = Machines(len(lab.milliseconds))
        self._port = PORT + 100

    def __enter__(self) -> "LiveLab":
        self.machines.__enter__()
        self._limit()
        return self

    def __exit__(self, *error: object) -> None:
        self.machines.__exit__(*error)

    def network(self) -> tuple[Network, list[list[Curve]]]:
        """What is measured, and the curve of every rank of every machine."""
        points, links, hidden, size = self.run(range(len(self.lab.milliseconds)), measure)
        by_names = {frozenset(map(str, nodes)): Link(*link) for nodes, link in links}
        network = Network(size, by_names)
        if hidden is not None:
            network = network._replace(hidden=hidden)
        remaining = iter(points)
        curves = [[curve_of(next(remaining)) for _ in own] for own in self.lab.milliseconds]
        return network, curves

    def run(self, choice: Sequence[int], work: Callable[..., Any], *arguments: Any) -> Any:
        """What rank 0 of these machines returns from ``work(world, lab, *arguments)``."""
        tasks = [len(self.lab.milliseconds[machine]) for machine in choice]
        self._port += 1
        context = multiprocessing.get_context("fork")
        processes, pipes = [], []
        for node_rank, machine in enumerate(choice):
            for local_rank in range(tasks[node_rank]):
                environ = {
                    "RANK": str(len(processes)),
                    "WORLD_SIZE": str(sum(tasks)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(tasks[node_rank]),
                    "NODE_RANK": str(node_rank),
                    "SLURMD_NODENAME": str(machine),
                    "MASTER_ADDR": self.machines.address(choice[0]),
                    "MASTER_PORT": str(self._port),
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                mine, theirs = context.Pipe()
                given = (self.machines.names[machine], environ, theirs, work)
                process = context.Process(
                    target=_serve, args=(*given, (self.lab, *arguments)), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
        found = pipes[0].recv()
        for process in processes:
            process.join(30)
        return found

    def _limit(self) -> None:
        """With a burst that is small beside the gradients: a real link has none."""
        for machine, name in enumerate(self.machines.names):
            for namespace, device in ((name, "eth0"), (self.machines.switch, f"port{machine}")):
                rate = f"{self.lab.megabits}mbit"
                shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
                command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape]
                subprocess.run(command, check=True)
