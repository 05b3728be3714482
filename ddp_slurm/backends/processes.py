"""Several processes as one: their lines labelled, all stopped when one fails or on Ctrl-C, nothing left running."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ddp_slurm.errors import DdpSlurmError, counted

STOP_GRACE_SECONDS = 5
"""Between SIGTERM and SIGKILL: enough to close a file, too short to finish a hung collective."""
LIFELINE_GRACE_SECONDS = 2 * STOP_GRACE_SECONDS
"""The other end of a lifeline needs its own grace and the way back."""
HEARTBEAT_SECONDS = 5
POLL_SECONDS = 0.05

PR_SET_PDEATHSIG = 1


class StartError(DdpSlurmError):
    """A process cannot be started."""


@dataclass(frozen=True)
class Process:
    """A command of this machine: what it runs with, how its lines are labelled, what messages call it."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    label: str
    name: str
    lifeline: str | None = field(default=None, repr=False)
    """Its standard input gets this line and a dot now and then, and is closed to stop it: for a command that runs on
    another machine, where no signal of ours reaches, and that must end when this process or the connection does."""


@dataclass(frozen=True)
class Ending:
    """How a run of several processes ended."""

    status: int
    """0, or the exit status of the first that failed (128 + its signal)."""
    interrupted: bool
    """By Ctrl-C or SIGTERM."""


def run_all(processes: Sequence[Process], noun: str) -> Ending:
    """Run the processes to the end, ``noun`` being what messages call one.

    When one fails, and on Ctrl-C or SIGTERM (status 130, 143), the others are stopped. Raises StartError.
    """
    return asyncio.run(_run_all(processes, noun))


async def _run_all(processes: Sequence[Process], noun: str) -> Ending:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    interrupts: list[int] = []
    failures: list[int] = []

    def interrupted(number: int) -> None:
        interrupts.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted, number)
    children: list[asyncio.subprocess.Process] = []
    watchers: list[asyncio.Task[None]] = []
    stopped = asyncio.create_task(stop.wait())
    try:
        for process in processes:
            child = await _start(process)
            children.append(child)
            watchers.append(asyncio.create_task(_watch(child, process, stop, failures)))
        # gather ends when all have, stop when one has failed
        ends: list[asyncio.Future[Any]] = [asyncio.gather(*watchers), stopped]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running = [child for child in children if child.returncode is None]
        if running:
            print(f"stopping {counted(len(running), noun)}", file=sys.stderr, flush=True)
        await _stop(running)
        await asyncio.gather(*watchers)
        stopped.cancel()
    status = 128 + interrupts[0] if interrupts else failures[0] if failures else 0
    return Ending(status, bool(interrupts))


async def _start(process: Process) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *process.argv,
            env=dict(process.environ),
            stdin=subprocess.DEVNULL if process.lifeline is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own: its children are stopped with it, Ctrl-C comes through us
            preexec_fn=_die_with_parent,
        )
    except OSError as fault:
        raise StartError(f"{process.argv[0]}: cannot be started: {fault.strerror}") from None


def _die_with_parent() -> None:
    """Even where this process is killed with SIGKILL, none stays (prctl(2), Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _watch(
    child: asyncio.subprocess.Process, process: Process, stop: asyncio.Event, failures: list[int]
) -> None:
    """Until the process has ended; the first that fails stops the others."""
    assert child.stdout is not None
    assert child.stderr is not None
    label = process.label.encode()
    pumps = asyncio.gather(
        _pump(child.stdout, sys.stdout.buffer, label), _pump(child.stderr, sys.stderr.buffer, label)
    )
    heartbeat = (
        asyncio.create_task(_hold_lifeline(child, process.lifeline))
        if process.lifeline is not None
        else None
    )
    returncode = await _exit_of(child)
    if heartbeat is not None:
        heartbeat.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it left behind would hold the pipes open
    await pumps
    if returncode and not stop.is_set():  # the others end because we stop them
        stop.set()
        failures.append(128 - returncode if returncode < 0 else returncode)
        ending = (
            f"was killed by {signal.Signals(-returncode).name}"
            if returncode < 0
            else f"exited with {returncode}"
        )
        print(f"{process.label}{process.name} {ending}", file=sys.stderr, flush=True)


async def _exit_of(child: asyncio.subprocess.Process) -> int:
    """Not ``child.wait()``: that also waits for the pipes, which a dead rank's data loaders still hold open."""
    while child.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return child.returncode


async def _hold_lifeline(child: asyncio.subprocess.Process, line: str) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(line.encode() + b"\n")
        while not child.stdin.is_closing():
            await child.stdin.drain()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            child.stdin.write(b".")


async def _pump(source: asyncio.StreamReader, sink: BinaryIO, label: bytes) -> None:
    """Copy whole lines, each with its label; a last line without an end is given one."""
    rest = b""
    while chunk := await source.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        _write(sink, b"".join(label + line + b"\n" for line in lines))
    if rest:
        _write(sink, label + rest + b"\n")


def _write(sink: BinaryIO, text: bytes) -> None:
    with contextlib.suppress(
        OSError
    ):  # "| head", a closed terminal, a full disk: the training goes on
        sink.write(text)
        sink.flush()


async def _stop(children: list[asyncio.subprocess.Process]) -> None:
    """Ask all to end, and kill those that don't."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
        else:
            _signal_group(child, signal.SIGTERM)
    for grace_seconds, has_lifeline in (
        (STOP_GRACE_SECONDS, False),
        (LIFELINE_GRACE_SECONDS, True),
    ):
        await _wait(
            [child for child in children if (child.stdin is not None) is has_lifeline],
            grace_seconds,
        )
    for child in children:
        _signal_group(child, signal.SIGKILL)
    await _wait(children, None)


def _signal_group(child: asyncio.subprocess.Process, number: int) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


async def _wait(children: list[asyncio.subprocess.Process], seconds: float | None) -> None:
    running = [
        asyncio.create_task(_exit_of(child)) for child in children if child.returncode is None
    ]
    if running:
        await asyncio.wait(running, timeout=seconds)
