"""The embedded default: every planned rank as a process of this machine, through the environment of a Slurm step.

Where the machine has no GPU the ranks compute on the CPU (gloo), so any plan can be tried anywhere.
"""

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ..cluster import Cluster, GpuModel, Node
from ..errors import DdpSlurmError
from ..plan import Plan, PlannedRank
from .sbatch import clean_environ

STOP_GRACE_SECONDS = 5
"""Between SIGTERM and SIGKILL: enough to close a file, too short to finish a hung collective."""

PR_SET_PDEATHSIG = 1
HOST = "127.0.0.1"


class LocalError(DdpSlurmError):
    """This machine cannot run the plan."""


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES would name them; no torch is loaded for that."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(part for part in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if part)
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(str(index) for index in range(sum(line.startswith("GPU ") for line in listing.splitlines())))


def this_machine(gpus: int | None) -> Cluster:
    """A cluster of this machine alone: its GPUs; without any, ``gpus`` ranks on the CPU (default one)."""
    count = len(visible_gpus()) or gpus or 1
    return Cluster("local", (Node(socket.gethostname(), (GpuModel(count=count),), cpus=os.cpu_count()),))


@dataclass(frozen=True)
class Process:
    """One rank: what it runs with and how its lines are labelled."""

    rank: PlannedRank
    label: str
    environ: Mapping[str, str]


def step_processes(plan: Plan, environ: Mapping[str, str]) -> Iterator[Process]:
    """Every rank with the variables that an srun step over the plan's components would set.

    Raises LocalError where the machine has GPUs, but fewer than the plan.
    """
    devices = visible_gpus()
    if devices and len(devices) < plan.world_size:
        raise LocalError(
            f"the plan has {plan.world_size} ranks, this machine has {len(devices)} GPUs; use --gpus {len(devices)}, "
            "or CUDA_VISIBLE_DEVICES= (empty) to try the whole plan on the CPU"
        )
    ranks = list(plan.ranks())
    on_node: dict[int, list[int]] = {}
    for rank in ranks:
        on_node.setdefault(rank.node_rank, []).append(rank.rank)
    base = {
        "OMP_NUM_THREADS": "1",  # as torchrun does: with every core's threads in each, the ranks would only wait
        "PYTHONUNBUFFERED": "1",
        **clean_environ(environ),
        **plan.step_env(),
        **plan.options.env,
        **_slurm_step(plan),
    }
    width = len(str(plan.world_size - 1))
    for rank in ranks:
        neighbours = on_node[rank.node_rank]
        yield Process(
            rank,
            f"[{rank.rank:{width}} {rank.node}] ",
            {
                **base,
                **{
                    k: v
                    for k, v in plan.components[rank.component].task_env.items()
                    if not k.endswith("_SOCKET_IFNAME")
                },
                "SLURM_PROCID": str(rank.rank),
                "SLURM_LOCALID": str(rank.local_rank),
                "SLURM_NODEID": str(rank.node_rank),
                "SLURMD_NODENAME": rank.node,
                "SLURM_GTIDS": ",".join(map(str, neighbours)),
                **({"CUDA_VISIBLE_DEVICES": ",".join(devices[i] for i in neighbours)} if devices else {}),
            },
        )


def _slurm_step(plan: Plan) -> dict[str, str]:
    env = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(plan.world_size),
        "SLURM_STEP_NUM_TASKS": str(plan.world_size),
        "SLURM_STEP_NODELIST": ",".join(sorted(c.nodelist for c in plan.components)),
        "SLURM_JOB_NODELIST": ",".join(sorted(c.nodelist for c in plan.components)),
        "MASTER_ADDR": HOST,  # the planned hosts' names mean nothing here
        "MASTER_PORT": str(_free_port()),
    }
    if len(plan.components) > 1:
        env["SLURM_HET_SIZE"] = str(len(plan.components))
        env |= {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": c.nodelist for i, c in enumerate(plan.components)}
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def task_command(plan: Plan) -> list[str]:
    """The command, with this very interpreter for a bare ``python``: the one that has the packages."""
    first, *rest = plan.options.task_command
    bare = first in ("python", "python3") and not plan.options.python
    return [sys.executable if bare else first, *rest]


def describe(plan: Plan) -> str:
    """The command of each rank with its variables, for ``--dry-run``."""
    lines = []
    for process in step_processes(plan, {}):
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(process.environ.items()))
        lines.append(f"{process.label}{variables} {shlex.join(task_command(plan))}\n")
    return "".join(lines)


def run(plan: Plan) -> int:
    """Run all ranks to the end. Returns 0, or the exit status of the first rank that failed (128 + its signal).

    When one fails, and on Ctrl-C or SIGTERM (130, 143), the others are stopped; nothing is left running.
    """
    processes = list(step_processes(plan, os.environ))
    return asyncio.run(_run_all(task_command(plan), processes))


async def _run_all(command: list[str], processes: list[Process]) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    interrupts: list[int] = []

    def interrupted(number: int) -> None:
        interrupts.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted, number)
    children: list[asyncio.subprocess.Process] = []
    watchers: list[asyncio.Task[int]] = []
    stopped = asyncio.create_task(stop.wait())
    try:
        for process in processes:
            child = await _start(command, process)
            children.append(child)
            watchers.append(asyncio.create_task(_watch(child, process, stop)))
        # gather ends when all ranks have, stop when one has failed
        await asyncio.wait([asyncio.gather(*watchers), stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        failed = [watcher.result() for watcher in watchers if watcher.done() and watcher.result()]
        running = [child for child in children if child.returncode is None]
        if running:
            print(f"stopping the other {len(running)} ranks", file=sys.stderr, flush=True)
        await _stop(running)
        await asyncio.gather(*watchers)
        stopped.cancel()
    return 128 + interrupts[0] if interrupts else failed[0] if failed else 0


async def _start(command: list[str], process: Process) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=dict(process.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own: its children are stopped with it, Ctrl-C comes through us
            preexec_fn=_die_with_parent,
        )
    except OSError as fault:
        raise LocalError(f"{command[0]}: cannot be started: {fault.strerror}") from None


def _die_with_parent() -> None:
    """Even where this process is killed with SIGKILL, no rank stays (prctl(2), Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _watch(child: asyncio.subprocess.Process, process: Process, stop: asyncio.Event) -> int:
    assert child.stdout is not None
    assert child.stderr is not None
    label = process.label.encode()
    pumps = asyncio.gather(_pump(child.stdout, sys.stdout.buffer, label), _pump(child.stderr, sys.stderr.buffer, label))
    returncode = await child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what the rank left behind would hold the pipes open
    await pumps
    if returncode and not stop.is_set():  # the others end because we stop them
        stop.set()
        ending = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with {returncode}"
        print(f"{process.label}rank {process.rank.rank} on {process.rank.node} {ending}", file=sys.stderr, flush=True)
    return 128 - returncode if returncode < 0 else returncode


async def _pump(source: asyncio.StreamReader, sink: BinaryIO, label: bytes) -> None:
    """Copy whole lines, each with its label; a last line without an end is given one."""
    rest = b""
    while chunk := await source.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        _write(sink, b"".join(label + line + b"\n" for line in lines))
    if rest:
        _write(sink, label + rest + b"\n")


def _write(sink: BinaryIO, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # "| head": the training goes on
        sink.write(text)
        sink.flush()


async def _stop(children: list[asyncio.subprocess.Process]) -> None:
    for number, grace_seconds in ((signal.SIGTERM, STOP_GRACE_SECONDS), (signal.SIGKILL, None)):
        running = [child for child in children if child.returncode is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        if running:
            await asyncio.wait([asyncio.create_task(child.wait()) for child in running], timeout=grace_seconds)
