"""The rank's side of submitit over uneven nodes: its place, its signals, commands.

Every rank imports this, so it imports little.
"""

import os
import signal
import subprocess
import sys
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

from ddp_slurm.rank_env import ENV_VARIABLES, RankEnv, hosts_in_order, known
from ddp_slurm.term_signal import TermWatch

__all__ = [
    "NAME",
    "HetSlurmJobEnvironment",
    "RankCommand",
    "SlurmJobEnvironment",
    "core",
    "utils",
]

NAME = "het_slurm"


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
        self._pickle = paths.submitted_pickle
        if self.global_rank == 0:
            _requeue_once(self._usr_sig())
        restarts_left = submission._timeout_countdown
        TermWatch(
            self._usr_sig(),
            is_rank_0=self.global_rank == 0,
            is_first_of_node=self.local_rank == 0,
            saves=restarts_left > 0,
        ).start()

    def _requeue(self, countdown: int) -> None:
        """After a checkpoint, which is a new file of submitit's with the function's arguments."""
        self._pickle.chmod(0o600)
        super()._requeue(countdown)

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
        return hosts_in_order(os.environ)

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


def _requeue_once(number: signal.Signals) -> None:
    """Let nothing disturb submitit's handler, which saves and calls ``scontrol requeue``.

    The signal may come twice, from Slurm and from this package. Slurm sends SIGTERM as soon as it
    has accepted, which may be before scontrol has ended; and with proctrack/linuxproc signals reach
    scontrol itself, which inherits that they are ignored.
    """
    save_and_requeue = signal.getsignal(number)
    assert callable(save_and_requeue)

    def handle(signum: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        save_and_requeue(signum, frame)

    signal.signal(number, handle)


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
