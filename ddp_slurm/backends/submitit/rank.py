"""The rank's side of submitit over uneven nodes: its place, its end after SIGTERM, commands.

Every rank imports this, so it imports little.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

from ddp_slurm.errors import DdpSlurmError

try:
    from submitit.core import core, utils
    from submitit.slurm.slurm import SlurmJobEnvironment
except ImportError as missing:
    raise DdpSlurmError(
        f"submitit is not installed here ({missing}); pip install 'ddp_slurm[submitit]'"
    ) from None

from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.rank_env import ENV_VARIABLES, RankEnv, known
from ddp_slurm.slurm_client.commands import ask_slurm

__all__ = ["NAME", "HetSlurmJobEnvironment", "RankCommand", "core", "utils"]

NAME = "het_slurm"
TERM_GRACE_SECONDS = 5.0
"""Between SIGTERM and the end of rank 0: enough to close a file."""
OTHERS_GRACE_SECONDS = 10.0
"""Of the other ranks: they wait until rank 0 knows whether the job is preempted."""
ASK_SECONDS = 8.0


class TasksOnNode(int):
    """The number of nodes; ``num_tasks // num_nodes`` is the number of tasks on *this* node.

    submitit's TorchDistributedEnvironment computes LOCAL_WORLD_SIZE with that division, which is
    right on even nodes only.
    """

    here: int

    def __new__(cls, nodes: int, here: int) -> "TasksOnNode":
        number = super().__new__(cls, nodes)
        number.here = here
        return number

    def __rfloordiv__(self, tasks: int) -> int:
        return self.here


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """The place of a rank inside a job of HetSlurmExecutor."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        """submitit's handlers, which ignore SIGTERM, and an end some seconds after SIGTERM."""
        super()._handle_signals(paths, submission)
        restarts_left = submission._timeout_countdown
        SignalWatch(
            self._usr_sig(),
            is_rank_0=self.global_rank == 0,
            may_restart=restarts_left > 0,
        ).start()

    @property
    def rank_env(self) -> RankEnv:
        """Rank, local rank, world size, local world size, node rank, master address and port."""
        # Those of the step, even if the function has exported torchrun's set.
        exported = {name for name in ENV_VARIABLES if not name.startswith("MASTER_")}
        environ = {name: value for name, value in os.environ.items() if name not in exported}
        return RankEnv.from_environ(environ)

    @property
    def hostnames(self) -> list[str]:
        """All hosts in the order of node ranks; Slurm's own list is sorted by name."""
        groups = range(int(os.environ.get("SLURM_HET_SIZE", 0)))
        lists = [os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in groups]
        if not lists:
            lists = [os.environ["SLURM_STEP_NODELIST"]]
        return [host for text in lists for host in expand_hostlist(text)]

    @property
    def num_nodes(self) -> int:
        return TasksOnNode(len(self.hostnames), self.local_world_size)

    @property
    def local_world_size(self) -> int:
        return known(self.rank_env.local_world_size, "SLURM_GTIDS")

    @property
    def master_addr(self) -> str:
        return self.rank_env.master_addr

    @property
    def master_port(self) -> int:
        return self.rank_env.master_port


class SignalWatch:
    """Ends this process some seconds after SIGTERM, unless the signal for a checkpoint follows.

    submitit ignores SIGTERM, since some clusters send that signal after it to a preempted job.
    After the death of another rank none follows: all GPUs would be held for KillWait, 30 s. Without
    PreemptParameters=send_user_signal none follows a preemption either: rank 0 then asks Slurm, and
    sends the signal to all ranks. The kernel's wake-up byte reaches this thread even while the main
    thread waits in a collective, where no handler of Python's runs.
    """

    def __init__(
        self, checkpoint_signal: signal.Signals, *, is_rank_0: bool, may_restart: bool = False
    ) -> None:
        self._checkpoint_signal = checkpoint_signal
        self._is_rank_0 = is_rank_0
        self._may_restart = may_restart
        self._grace_seconds = TERM_GRACE_SECONDS if is_rank_0 else OTHERS_GRACE_SECONDS
        self._reader, self._writer = os.pipe()
        self._must_end = False
        self._writes_checkpoint = False

    def start(self) -> None:
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # The SIGTERM of a forked data loader is not this rank's.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._watch, name="signal-watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            timeout = self._grace_seconds if self._must_end else None
            readable, _, _ = select.select([self._reader], [], [], timeout)
            if not readable:
                os._exit(128 + signal.SIGTERM)
            for number in os.read(self._reader, 512):  # a byte for each signal, in their order
                self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number == self._checkpoint_signal:
            self._must_end = False
            self._writes_checkpoint = self._is_rank_0
        elif number == signal.SIGTERM and not self._must_end:
            self._must_end = not self._writes_checkpoint
            asks = self._must_end and self._is_rank_0 and self._may_restart
            if asks and _is_preempted():
                name = self._checkpoint_signal.name.removeprefix("SIG")
                job_id = os.environ["SLURM_JOB_ID"]
                ask_slurm(["scancel", f"--signal={name}", job_id], timeout_seconds=ASK_SECONDS)


def _is_preempted() -> bool:
    """Whether Slurm has announced the preemption of this job, which still runs."""
    columns = "--Format=State:20,PreemptTime:30"
    job = f"--jobs={os.environ['SLURM_JOB_ID']}"
    answer = ask_slurm(
        ["squeue", "--noheader", "--states=all", job, columns], timeout_seconds=ASK_SECONDS
    )
    first_component = answer.out.split()[:2]
    return first_component[:1] == ["RUNNING"] and first_component[1:] != ["N/A"]


class RankCommand:
    """A command as the function of every rank: its result is the exit status 0, or an error."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def __call__(self) -> int:
        # The command gets Slurm's signal itself and decides; submitit's handler would end this
        # process before it. A handler, since the command would inherit SIG_IGN.
        signal.signal(SlurmJobEnvironment._usr_sig(), _leave_it_to_the_command)
        done = subprocess.run(self.command)
        if done.returncode:
            sys.excepthook = _exit_like_the_command
        done.check_returncode()
        return 0


def _exit_like_the_command(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End this process with the command's status; an uncaught exception alone gives 1."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(error, subprocess.CalledProcessError):
        status = error.returncode
        os._exit(status if status > 0 else 128 - status)


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    pass
