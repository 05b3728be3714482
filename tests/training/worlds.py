"""Worlds of gloo ranks for the tests, forked from a server that has imported torch once, so that a
world starts in a second."""

import contextlib
import io
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 90.0
NO_TOKEN = {"DDP_SLURM_TOKEN": ""}
"""As with a launcher that knows nothing of this project."""

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "ddp_slurm.training",
        "tests.training.workers",
        "tests.training.joining",
        "tests.training.strangers",
    ]
)


def tell(pipe: Connection, value: Any) -> None:
    """Send by plain pickle: with torch ``Connection.send`` leaves tensors in shared memory."""
    pipe.send_bytes(pickle.dumps(value))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environments(tasks: Sequence[int]) -> list[dict[str, str]]:
    """The env:// variables of every rank for so many tasks on each node. All nodes are this
    machine."""
    world_size, port, result = sum(tasks), free_port(), []
    token = secrets.token_hex(16)  # worlds of tests that run at once do not find each other
    for node, count in enumerate(tasks):
        for local_rank in range(count):
            result.append(
                {
                    "RANK": str(len(result)),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(count),
                    "NODE_RANK": str(node),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "DDP_SLURM_TOKEN": token,
                }
            )
    return result


def _child(
    environ: Mapping[str, str], log: str, pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    for name in [
        name for name in os.environ if name.startswith(("SLURM", "DDP_SLURM", "TORCHELASTIC"))
    ]:
        del os.environ[name]
    os.environ.update(environ)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    import torch

    torch.set_num_threads(1)
    try:
        tell(pipe, function(pipe, *args))
    except SystemExit as exit_:
        _leave(exit_.code if isinstance(exit_.code, int) else 1)
    except BaseException:
        # What the interpreter would do; multiprocessing would not call the hook.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _leave(1)
    _leave(0)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class World:
    """Running ranks; ``pipes`` reach their functions, which get the other end as first argument."""

    processes: list[ForkServerProcess]
    pipes: list[Connection]
    logs: list[Path]

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def all_logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in range(len(self.logs)))

    def receive(self, rank: int, patience_seconds: float = PATIENCE_SECONDS) -> Any:
        """The next message of a rank. Raises AssertionError, with all logs, without one."""
        try:
            if self.pipes[rank].poll(patience_seconds):
                return pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            pass
        raise AssertionError(f"rank {rank} sent nothing\n{self.all_logs()}")

    def results(self) -> list[Any]:
        """What every rank's function returned; all must have ended well."""
        values = [self.receive(rank) for rank in range(len(self.processes))]
        assert self.wait() == [0] * len(self.processes), self.all_logs()
        return values

    def wait(self, patience_seconds: float = PATIENCE_SECONDS) -> list[int | None]:
        """Exit statuses; -9 for a rank killed by signal 9, None for one that still runs."""
        deadline = time.monotonic() + patience_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def end(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                self.signal(rank, signal.SIGKILL)
            process.join()
            self.pipes[rank].close()


@contextlib.contextmanager
def world(
    folder: Path,
    tasks: Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    environ: Mapping[str, str] | None = None,
    change: Callable[[int, dict[str, str]], dict[str, str]] | None = None,
) -> Iterator[World]:
    """Start ``function(pipe, *args)`` on every rank; whatever still runs at the end is killed.

    Args:
        folder: for the logs.
        tasks: ranks on each node.
        environ: for all ranks.
        change: (rank, its variables) to what it gets instead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running = World([], [], [])
    try:
        for rank, variables in enumerate(rank_environments(tasks)):
            variables = {**variables, **(environ or {})}
            variables = change(rank, variables) if change else variables
            mine, theirs = server.Pipe()
            log = folder / f"rank{rank}.log"
            process = server.Process(
                target=_child, args=(variables, str(log), theirs, function, args)
            )
            process.start()
            theirs.close()
            running.processes.append(process)
            running.pipes.append(mine)
            running.logs.append(log)
        yield running
    finally:
        running.end()


def run_world(
    folder: Path, tasks: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """The results of ``function`` on every rank, all of which must end well."""
    with world(folder, tasks, function, *args, **options) as running:
        return running.results()
