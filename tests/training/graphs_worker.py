"""A Trainer whose graphs are plain calls: on CPUs, with all of the bookkeeping."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddp_slurm.training.graphs import capture, choice, compute
from ddp_slurm.training.trainer import step

from .trainer_worker import Report, Run, train
from .worlds import world


@dataclass(frozen=True)
class Stand:
    """What stands in for CUDA.

    ``error`` is raised by every capture; ``seconds`` are those of a step without and with graphs;
    with ``has_dropout`` the CPU's random numbers stand for the GPU's.
    """

    error: str | None = None
    waits: bool = False
    seconds: tuple[float, float] | None = None
    has_dropout: bool = False


@dataclass
class Calls:
    captures: int = 0
    replays: list[int] = field(default_factory=list)
    """How often each captured function was called again."""


def pretend(stand: Stand) -> Calls:
    """Let this process capture by remembering the function."""
    calls = Calls()

    def captured(function: Callable[[], object], pool: Any) -> Callable[[], None]:
        if stand.error:
            raise RuntimeError(stand.error)
        number = calls.captures
        calls.captures += 1
        calls.replays.append(0)

        def replay() -> None:
            calls.replays[number] += 1
            function()

        return replay

    @contextlib.contextmanager
    def watch() -> Iterator[list[str]]:
        yield ["model.py:7"] if stand.waits else []

    capture.captured = captured
    compute.torch.cuda.graph_pool_handle = object
    capture.watch_for_waiting = watch
    step.reason_of_device = lambda device: None
    if stand.has_dropout:
        compute.cpu_random_state = dict
    if stand.seconds:
        _pretend_time(*stand.seconds)
    return calls


def _pretend_time(without: float, with_graphs: float) -> None:
    """Each look at the clock is one step after the one before."""

    def now(graphs: Any) -> float:
        clock[0] += with_graphs if graphs.in_use else without
        return clock[0]

    clock = [0.0]
    choice.Graphs._now = now  # type: ignore[method-assign]


def graphed(pipe: Connection, run: Run, stand: Stand) -> tuple[Report, Calls]:
    calls = pretend(stand)
    return train(pipe, run), calls


def run_graphed(
    folder: Path,
    tasks: tuple[int, ...],
    settings: Run,
    stand: Stand = Stand(),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Report], list[Calls], str]:
    """Reports and calls of all ranks, and what rank 0 printed."""
    with world(folder, tasks, graphed, settings, stand, environ=environ) as running:
        results = []
        for rank in range(sum(tasks)):
            message = running.receive(rank)
            while isinstance(message, int):
                message = running.receive(rank)
            results.append(message)
        assert running.wait() == [0] * sum(tasks), running.all_logs()
        reports, calls = zip(*results, strict=True)
        return list(reports), list(calls), running.log(0)
