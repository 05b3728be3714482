"""The ranks of ``links.py``: forked after the imports, each inside its machine's namespace. They
run one cell of a table after another."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.links_network import PORT, Machines, enter
from ddp_slurm.comm import Comm
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import World, init_distributed
from ddp_slurm.training.links.exchange import Exchange
from ddp_slurm.training.links.layout import Layout

Cell = dict[str, Any]
"""What to run; its key ``kind`` is ``sum`` or ``train``."""


class Ranks:
    """Processes that answer cells. ``run`` returns None where one fails or takes too long."""

    def __init__(self, machines: Machines, tasks: Sequence[int], *, gpus: bool) -> None:
        self._machines, self._tasks, self._gpus = machines, tasks, gpus
        self._processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []
        self._starts = 0

    def run(self, cell: Cell, limit_seconds: float) -> list[Any] | None:
        """The result of every rank."""
        if not self._processes:
            self._start()
            limit_seconds += 60
        deadline = time.monotonic() + limit_seconds
        try:
            for pipe in self._pipes:
                pipe.send(cell)
            return [self._receive(pipe, deadline) for pipe in self._pipes]
        except (EOFError, OSError, TimeoutError) as error:
            print(f"{cell}: {type(error).__name__}: {error}", flush=True)
            self.end()
            return None

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._processes, self._pipes = [], []

    def _receive(self, pipe: Connection, deadline: float) -> Any:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("no answer in time")
        return pipe.recv()

    def _start(self) -> None:
        self._starts += 1  # a port of its own: the last one may still be in use
        context = multiprocessing.get_context("fork")
        rank = 0
        for machine, count in enumerate(self._tasks):
            for local_rank in range(count):
                environ = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(sum(self._tasks)),
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count),
                    "NODE_RANK": str(machine),
                    "MASTER_ADDR": self._machines.address(0),
                    "MASTER_PORT": str(PORT + self._starts),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "NCCL_SOCKET_IFNAME": "=eth0",
                    "SLURMD_NODENAME": f"machine{machine}",
                    "CUDA_VISIBLE_DEVICES": str(rank) if self._gpus else "",
                    # nothing but the network between the two cards
                    "NCCL_P2P_DISABLE": "1",
                    "NCCL_SHM_DISABLE": "1",
                    "NCCL_IB_DISABLE": "1",
                    "NCCL_NVLS_ENABLE": "0",
                }
                mine, theirs = context.Pipe()
                arguments = (self._machines.names[machine], environ, theirs, self._gpus)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)
                rank += 1


def _serve(namespace: str, environ: dict[str, str], pipe: Connection, gpus: bool) -> None:
    enter(namespace)
    os.environ.update(environ)
    if not gpus:
        torch.set_num_threads(1)
    world = init_distributed(backend="nccl" if gpus else "gloo", timeout_seconds=120)
    exchange = Exchange(Layout.of([fact.node_rank for fact in world.ranks]), world.device)
    while True:
        cell = pipe.recv()
        if cell["kind"] == "sum":
            pipe.send(_seconds_of_sum(exchange, cell))
        else:
            pipe.send(_images_per_second(world, cell))


def _seconds_of_sum(exchange: Exchange, cell: Cell) -> float:
    """The median of some all-reduces."""
    exchange.two_levels, exchange.bf16 = cell["two_levels"], cell["bf16"]
    seconds = []
    for repeat in range(1 + cell["repeats"]):
        # the first one connects the ranks
        buffer = torch.ones(cell["bytes"] // 4 if repeat else 1000)
        dist.barrier()
        started = time.perf_counter()
        exchange.start(buffer).wait()
        if repeat:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _images_per_second(world: World, cell: Cell) -> dict[str, float]:
    """Of this rank, in a training with synthetic images that are on the device already."""
    batch, device, is_small = cell["batch"], world.device, cell["small"]
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    network = to_channels_last((small_resnet() if is_small else resnet18()).to(device))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    model: nn.Module = network
    period = 1
    if cell["way"] != "alone":
        way, _, mebibytes = cell["way"].partition("@")
        os.environ["DDP_SLURM_COMM"] = way
        os.environ["DDP_SLURM_BUCKET_BYTES"] = str(int(mebibytes) << 20) if mebibytes else ""
        period = Comm.read(way).steps or 1
        model = world.wrap(network, optimizer, [batch] * world.world_size)
    images = torch.randn(batch, 3, 32, 32, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device=device) % 10

    def train(steps: int) -> float:
        """Seconds."""
        _wait(device)
        started = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=not is_small):
                loss = cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _wait(device)
        return time.perf_counter() - started

    # PowerSGD begins after 10 steps; local steps average in the background from the second period.
    train(max(12, 2 * period))
    a_period = torch.tensor(train(max(3, period)) / max(3, period) * period)
    dist.all_reduce(a_period, op=dist.ReduceOp.MAX, group=world.control)
    steps = period * max(2, 1 + int(cell["seconds"] / a_period.item()))
    dist.barrier(group=world.control)
    seconds = train(steps)
    world.average()
    world.local_steps.clear()
    bytes_of_gradients = sum(p.numel() * p.element_size() for p in network.parameters())
    return {"images": steps * batch / seconds, "bytes": bytes_of_gradients}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
