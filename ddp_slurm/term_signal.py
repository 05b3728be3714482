"""What a rank does after SIGTERM: it saves where its job is preempted, and ends otherwise.

Slurm sends SIGTERM before a preemption with a grace time, and also when a job is cancelled, or when
srun ends the ranks since one of them has failed. Standard library only.
"""

import os
import select
import signal
import threading
from typing import Literal

from ddp_slurm.ask import ask

RANK_0_GRACE_SECONDS = 5.0
"""Between SIGTERM and the end of rank 0 where Slurm does not respond: the signal to save may follow
without its help (PreemptParameters=send_user_signal)."""
OTHERS_GRACE_SECONDS = 20.0
"""Of the other ranks: they wait until one that asks knows whether the job is preempted. Slurm
itself ends them after KillWait, 30 seconds where a site has not changed it."""
ASK_SECONDS = 8.0
AGAIN_SECONDS = 1.0
"""Slurm may send SIGTERM just before it shows the time of the preemption."""
STILL_RUNS = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING")
"""A job's states in squeue that are not its end. SIGNALING is shown while Slurm sends signals."""

_received: list[int] = []


def has_term() -> bool:
    """Whether a TermWatch of this process has seen SIGTERM, and no signal to save after it."""
    return bool(_received)


class TermWatch:
    """Ends this process after SIGTERM, unless the signal to save follows.

    The first rank of each node asks Slurm whether the job is preempted, and then sends that signal
    to all ranks: Slurm preempts the components of a job one after another, up to 20 seconds apart.
    The kernel's wake-up byte reaches the thread even while the main thread waits in a collective,
    where no handler of Python's runs; the process must have a handler for both signals.

    Args:
        save_signal: what lets the ranks save.
        is_first_of_node: whether this rank asks Slurm.
        saves: whether ranks ask Slurm at all; otherwise every rank ends.
        all_save: whether all ranks take part in saving, and not rank 0 alone.
    """

    def __init__(
        self,
        save_signal: signal.Signals,
        *,
        is_rank_0: bool,
        is_first_of_node: bool,
        saves: bool = True,
        all_save: bool = False,
    ) -> None:
        self._save_signal = save_signal
        self._is_rank_0 = is_rank_0
        self._asks = is_first_of_node and saves
        self._takes_part = is_rank_0 or all_save
        self._grace_seconds = RANK_0_GRACE_SECONDS if is_rank_0 else OTHERS_GRACE_SECONDS
        self._reader, self._writer = os.pipe()
        self._must_end = False
        self._is_saving = False

    def start(self) -> None:
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # The SIGTERM of a forked data loader is not this rank's.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._watch, name="term-watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            timeout = self._grace_seconds if self._must_end else None
            readable, _, _ = select.select([self._reader], [], [], timeout)
            if not readable:
                _end()
            for number in os.read(self._reader, 512):  # a byte for each signal, in their order
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number == self._save_signal:
            self._must_end = False
            self._is_saving = self._takes_part
            _received.clear()
        elif number == signal.SIGTERM and not self._must_end and not self._is_saving:
            self._must_end = True
            _received.append(number)
            if self._asks:
                self._save_or_end()

    def _save_or_end(self) -> None:
        fate = _fate()
        if fate == "running":
            readable, _, _ = select.select([self._reader], [], [], AGAIN_SECONDS)
            if readable:  # perhaps the signal to save
                return
            fate = _fate()
        if fate == "preempted":
            name = self._save_signal.name.removeprefix("SIG")
            _ask_slurm("scancel", f"--signal={name}", os.environ["SLURM_JOB_ID"])
        elif fate is not None and self._is_rank_0:
            _end()


def _end() -> None:
    os._exit(128 + signal.SIGTERM)


def _fate() -> Literal["preempted", "running", "ended"] | None:
    """What Slurm reports about all components of this job; None where it does not respond."""
    job = f"--jobs={os.environ['SLURM_JOB_ID']}"
    columns = "--Format=State:20,PreemptTime:30"
    lines = _ask_slurm("squeue", "--noheader", "--states=all", job, columns).splitlines()
    components = [words for line in lines if len(words := line.split()) == 2]
    if not components:
        return None
    if any(state not in STILL_RUNS for state, _ in components):
        return "ended"
    return "preempted" if any(time != "N/A" for _, time in components) else "running"


def _ask_slurm(*argv: str) -> str:
    environ = {name: value for name, value in os.environ.items() if "SQUEUE_" not in name}
    return ask(argv, timeout_seconds=ASK_SECONDS, environ=environ).out
