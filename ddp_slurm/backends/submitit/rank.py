"""The rank's side of submitit over uneven nodes: its place, the end after SIGTERM, commands as functions.

Every rank imports this, so it imports little.
"""

import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType

from ddp_slurm.errors import DdpSlurmError

try:
    from submitit.core import core, utils
    from submitit.slurm.slurm import SlurmJobEnvironment
except ImportError as missing:
    raise DdpSlurmError(
        f"submitit is not installed here ({missing}); pip install 'ddp_slurm[submitit]'"
    ) from None

from ddp_slurm.hostlist import expand_hostlist
from ddp_slurm.rank_env import ENV_VARIABLES, RankEnv

__all__ = ["NAME", "HetSlurmJobEnvironment", "RankCommand", "core", "utils"]

NAME = "het_slurm"
TERM_GRACE_SECONDS = 5.0
"""Between SIGTERM and the end of a rank: enough to close a file."""


class TasksOnNode(int):
    """The number of nodes, for code that divides by it: ``num_tasks // num_nodes`` is the tasks on *this* node.

    submitit's TorchDistributedEnvironment takes LOCAL_WORLD_SIZE from that division, which is right on even nodes only.
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
        """submitit's handlers, of which that for SIGTERM ignores it, and an end some seconds after it."""
        super()._handle_signals(paths, submission)
        _end_after_sigterm(int(self._usr_sig()), is_rank_0=self.global_rank == 0)

    @property
    def rank_env(self) -> RankEnv:
        """Rank, local rank, world size, local world size, node rank, master address and port."""
        # of the step, also when the function has exported the env:// set
        exported = {name for name in ENV_VARIABLES if not name.startswith("MASTER_")}
        return RankEnv.from_environ({k: v for k, v in os.environ.items() if k not in exported})

    @property
    def hostnames(self) -> list[str]:
        """All hosts in the order of node ranks: the first is rank 0's. Slurm's own list is sorted by name."""
        groups = range(int(os.environ.get("SLURM_HET_SIZE", 0)))
        lists = [os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in groups]
        return [
            host
            for text in lists or [os.environ["SLURM_STEP_NODELIST"]]
            for host in expand_hostlist(text)
        ]

    @property
    def num_nodes(self) -> int:
        return TasksOnNode(len(self.hostnames), self.local_world_size)

    @property
    def local_world_size(self) -> int:
        return self.rank_env.local_world_size

    @property
    def master_addr(self) -> str:
        return self.rank_env.master_addr

    @property
    def master_port(self) -> int:
        return self.rank_env.master_port


def _end_after_sigterm(checkpoint_signal: int, *, is_rank_0: bool) -> None:
    """End this process some seconds after SIGTERM, unless the signal for a checkpoint comes.

    submitit ignores SIGTERM, since a preempted job gets it before that signal. After another rank's death nothing else
    comes: all GPUs would be held for KillWait, 30 s. The kernel's wake-up byte reaches the thread also while the main
    thread waits in a collective, where no handler of Python's runs.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(
        after_in_child=lambda: signal.set_wakeup_fd(-1)
    )  # a worker's SIGTERM is not this rank's

    def watch() -> None:
        terminated, checkpoint = False, False
        while True:
            ready, _, _ = select.select(
                [reader], [], [], TERM_GRACE_SECONDS if terminated else None
            )
            if not ready:
                os._exit(128 + signal.SIGTERM)
            for number in os.read(reader, 512):  # a byte a signal, in their order
                if number == checkpoint_signal:
                    terminated, checkpoint = False, True
                elif number == signal.SIGTERM:
                    terminated = not (checkpoint and is_rank_0)  # rank 0 writes it

    threading.Thread(target=watch, name="end-after-sigterm", daemon=True).start()


class RankCommand:
    """A command as the function of every rank: its result is the exit status 0, any other is an error."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    def __call__(self) -> int:
        # The command gets Slurm's signal itself and decides; submitit's handler would end this rank under it. A
        # handler, not SIG_IGN, which the command would inherit.
        signal.signal(SlurmJobEnvironment._usr_sig(), _leave_it_to_the_command)
        subprocess.run(self.command, check=True)
        return 0


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    pass
