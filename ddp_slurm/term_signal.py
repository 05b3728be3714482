"""What a rank does after SIGTERM: it saves where its job is preempted, and ends otherwise.

Slurm sends SIGTERM before a preemption with a grace time, and also when a job is cancelled, or when
srun ends the ranks since one of them has failed. Standard library only.
"""

import os
import select
import signal
import threading

from ddp_slurm.ask import ask

RANK_0_GRACE_SECONDS = 5.0
"""Between SIGTERM and the end of rank 0 where Slurm does not respond: the signal to save may follow
without its help (PreemptParameters=send_user_signal)."""
OTHERS_GRACE_SECONDS = 20.0
"""Of the other ranks: they wait until rank 0 knows whether the job is preempted. Slurm itself ends
them after KillWait, 30 seconds where a site has not changed it."""
ASK_SECONDS = 8.0

_received: list[int] = []


def has_term() -> bool:
    """Whether a TermWatch of this process has seen SIGTERM, and no signal to save after it."""
    return bool(_received)


class TermWatch:
    """Ends this process after SIGTERM, unless the signal to save follows.

    Rank 0 asks Slurm whether the job is preempted, and then sends that signal to all ranks. The
    kernel's wake-up byte reaches the thread even while the main thread waits in a collective, where
    no handler of Python's runs; the process must have a handler for both signals.

    Args:
        save_signal: what lets the ranks save.
        saves: whether rank 0 asks Slurm; otherwise every rank ends.
        all_save: whether all ranks take part in saving, and not rank 0 alone.
    """

    def __init__(
        self,
        save_signal: signal.Signals,
        *,
        is_rank_0: bool,
        saves: bool = True,
        all_save: bool = False,
    ) -> None:
        self._save_signal = save_signal
        self._is_rank_0 = is_rank_0
        self._saves = saves
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
            if self._is_rank_0 and self._saves:
                self._save_or_end()

    def _save_or_end(self) -> None:
        is_preempted = _is_preempted()
        if is_preempted:
            name = self._save_signal.name.removeprefix("SIG")
            _ask_slurm("scancel", f"--signal={name}", os.environ["SLURM_JOB_ID"])
        elif is_preempted is False:
            _end()


def _end() -> None:
    os._exit(128 + signal.SIGTERM)


def _is_preempted() -> bool | None:
    """Whether Slurm has announced the preemption of this job, which still runs; None where Slurm
    does not respond."""
    job = f"--jobs={os.environ['SLURM_JOB_ID']}"
    columns = "--Format=State:20,PreemptTime:30"
    first_component = _ask_slurm("squeue", "--noheader", "--states=all", job, columns).split()[:2]
    if len(first_component) < 2:
        return None
    return first_component[0] == "RUNNING" and first_component[1] != "N/A"


def _ask_slurm(*argv: str) -> str:
    environ = {name: value for name, value in os.environ.items() if "SQUEUE_" not in name}
    return ask(argv, timeout_seconds=ASK_SECONDS, environ=environ).out
