"""Several processes as one: their lines labelled, all stopped when one fails or on a signal."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ddp_slurm.errors import DdpSlurmError, counted
from ddp_slurm.parent import die_with_parent

STOP_GRACE_SECONDS = 5
"""Between SIGTERM and SIGKILL: enough to close a file, too short to finish a hung collective."""
LIFELINE_GRACE_SECONDS = 2 * STOP_GRACE_SECONDS
"""The other end of a lifeline needs its own grace and the way back."""
HEARTBEAT_SECONDS = 5
EARLY_SECONDS = 60.0
"""How long the others may run on silently after the first has ended with status 0."""
POLL_SECONDS = 0.05
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Those that stop all processes: the terminal is closed, Ctrl-C, Ctrl-\\, kill."""

Child = asyncio.subprocess.Process


class StartError(DdpSlurmError):
    """A process cannot be started."""


@dataclass(frozen=True)
class Process:
    """A command of this machine."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    """Its whole environment."""
    label: str
    """The beginning of each of its lines."""
    name: str
    """What messages call it."""
    lifeline: str | None = field(default=None, repr=False)
    """Its standard input gets this text and a dot every few seconds, and is closed to stop it.

    For a command that runs on another machine, which no signal of ours reaches, and that must end
    when this process or the connection does."""


@dataclass(frozen=True)
class Ending:
    """How a run of several processes ended."""

    status: int
    """0, or the exit status of the first that failed (128 + its signal)."""
    interrupted: bool
    """By one of STOP_SIGNALS."""


def run_all(processes: Sequence[Process], noun: str) -> Ending:
    """Run the processes to the end; messages call one of them a ``noun``.

    When one fails, and on one of STOP_SIGNALS (status 128 + signal), the others are stopped. Raises
    StartError.
    """
    return asyncio.run(_Run(noun).run(processes))


class _Run:
    """Processes that end together."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.children: list[Child] = []
        self.stopping = asyncio.Event()
        self.interrupt: signal.Signals | None = None
        self.failure = 0
        """The exit status of the first that failed."""
        self.note: asyncio.Task[None] | None = None
        """Of the first that ended with status 0."""
        self.first_ended: str | None = None
        """Its name."""

    async def run(self, processes: Sequence[Process]) -> Ending:
        for number in STOP_SIGNALS:
            # nohup ignores SIGHUP, and a script ignores SIGINT for what it starts in the background
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        watchers: list[asyncio.Task[None]] = []
        try:
            for process in processes:
                child = await _start(process)
                self.children.append(child)
                watchers.append(asyncio.create_task(self._watch(child, process)))
            await self._until_all_ended_or_one_failed(watchers)
        finally:
            await self._stop_running()
            await asyncio.gather(*watchers)
            if self.note is not None:
                self.note.cancel()
        if self.interrupt is not None:
            # The loop ends and with it the handlers. A terminal that closes may send SIGHUP twice,
            # and the caller still has to record how the run ended.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            return Ending(128 + self.interrupt, interrupted=True)
        return Ending(self.failure, interrupted=False)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.interrupt is None:
            self.interrupt = number
        self.stopping.set()

    async def _until_all_ended_or_one_failed(self, watchers: Sequence[asyncio.Task[None]]) -> None:
        all_ended: asyncio.Future[Any] = asyncio.gather(*watchers)
        stopping: asyncio.Future[Any] = asyncio.create_task(self.stopping.wait())
        await asyncio.wait([all_ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _watch(self, child: Child, process: Process) -> None:
        """Copy the output and wait for the end; the first that fails stops the others."""
        copies = _copy_output(child, process.label.encode())
        heartbeat = asyncio.create_task(_hold_lifeline(child, process.lifeline))
        status = await _exit_of(child)
        heartbeat.cancel()
        # What the process left behind would hold the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await copies
        is_news = status != 0 and not self.stopping.is_set()  # the others end because we stop them
        if is_news:
            self.stopping.set()
            self.failure = 128 - status if status < 0 else status
            _report(f"{process.label}{process.name} {_described(status)}")
            if self.first_ended is not None:
                _report(
                    f"{self.first_ended} had ended with status 0 before; if the others waited for "
                    "it, it left early (sys.exit, return) or its loop had fewer steps"
                )
        if status == 0 and self.note is None:
            self.first_ended = process.name
            self.note = asyncio.create_task(self._note_early_end(process))

    async def _note_early_end(self, process: Process) -> None:
        """Ranks that wait for one that has left write nothing until their own time limit."""
        await asyncio.sleep(EARLY_SECONDS)
        running = sum(child.returncode is None for child in self.children)
        if running:
            _report(
                f"{process.label}{process.name} ended with status 0 {EARLY_SECONDS:g} s ago; still "
                f"running: {counted(running, self.noun)}. If they wait for it, it left early "
                "(sys.exit, return) or its loop had fewer steps"
            )

    async def _stop_running(self) -> None:
        running = [child for child in self.children if child.returncode is None]
        if running:
            _report(f"stopping {counted(len(running), self.noun)}")
            await _stop(running)


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _described(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with {status}"


async def _start(process: Process) -> Child:
    try:
        return await asyncio.create_subprocess_exec(
            *process.argv,
            env=dict(process.environ),
            stdin=subprocess.DEVNULL if process.lifeline is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own: its children are stopped with it, and Ctrl-C comes through us.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise StartError(f"{process.argv[0]}: cannot be started: {error.strerror}") from None


async def _exit_of(child: Child) -> int:
    """The exit status; ``child.wait()`` also waits until data loaders close the pipes."""
    while child.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    return child.returncode


async def _hold_lifeline(child: Child, text: str | None) -> None:
    if text is None or child.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(text.encode() + b"\n")
        while not child.stdin.is_closing():
            await child.stdin.drain()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            child.stdin.write(b".")


def _copy_output(child: Child, label: bytes) -> asyncio.Future[tuple[None, None]]:
    """Begin to copy both streams; the result is done at their ends."""
    assert child.stdout is not None
    assert child.stderr is not None
    return asyncio.gather(
        _copy_lines(child.stdout, sys.stdout.buffer, label),
        _copy_lines(child.stderr, sys.stderr.buffer, label),
    )


async def _copy_lines(source: asyncio.StreamReader, sink: BinaryIO, label: bytes) -> None:
    """Copy whole lines, each with its label; a last line without an end gets one."""
    rest = b""
    while chunk := await source.read(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        _write(sink, b"".join(label + line + b"\n" for line in lines))
    if rest:
        _write(sink, label + rest + b"\n")


def _write(sink: BinaryIO, text: bytes) -> None:
    # After "| head", a closed terminal or a full disk the training goes on.
    with contextlib.suppress(OSError):
        sink.write(text)
        sink.flush()


async def _stop(children: Sequence[Child]) -> None:
    """Ask all to end, and kill those that do not."""
    with_lifeline = [child for child in children if child.stdin is not None]
    here = [child for child in children if child.stdin is None]
    for child in with_lifeline:
        assert child.stdin is not None
        child.stdin.close()
    for child in here:
        _signal_group(child, signal.SIGTERM)
    await _wait(here, STOP_GRACE_SECONDS)
    await _wait(with_lifeline, LIFELINE_GRACE_SECONDS)
    for child in children:
        _signal_group(child, signal.SIGKILL)
    await _wait(children, None)


def _signal_group(child: Child, number: int) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


async def _wait(children: Sequence[Child], seconds: float | None) -> None:
    running = [child for child in children if child.returncode is None]
    if running:
        exits = [asyncio.create_task(_exit_of(child)) for child in running]
        await asyncio.wait(exits, timeout=seconds)
