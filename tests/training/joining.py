"""What the ranks of the test worlds run to meet, to fail and to leave. Imported by the server they
are forked from, so it stays light."""

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training import init_distributed
from ddp_slurm.training.exchange import all_gather_values, broadcast_value, gather_values
from ddp_slurm.training.process_group import failure, peers, rendezvous, start_group
from ddp_slurm.training.process_group.store import group_store
from ddp_slurm.training.trainer.precision import Precision, choose_precision

from .worlds import tell


def join(pipe: Connection, rendezvous_seconds: float = 60.0) -> str:
    """``met``, or the text of the error that ``init_distributed`` raises on this rank."""
    try:
        with init_distributed(rendezvous_seconds=rendezvous_seconds):
            return "met"
    except LaunchError as error:
        return str(error)


def meet_in_nccls_store(pipe: Connection) -> list[str]:
    """What all ranks have written into the store that NCCL gets; the group itself is gloo's."""
    found: list[str] = []

    def store_of_nccl(store: Store, env: RankEnv, backend: str, seconds: float) -> Store:
        own = group_store(store, env, "nccl", seconds)
        own.set(f"from {env.rank}", type(own.underlying_store).__name__)
        found.extend(own.get(f"from {rank}").decode() for rank in range(env.world_size))
        return own

    start_group.group_store = store_of_nccl
    with init_distributed():
        dist.barrier()
    return found


def fail_at_three(pipe: Connection, how: str) -> None:
    """Rank 3 fails while the others wait for it in a collective that would wait for ten minutes."""
    with init_distributed() as world:
        dist.barrier()
        if world.rank == 3:
            if how == "raise":
                raise ValueError("a bad sample")
            if how == "user's error":
                raise DdpSlurmError("precision fp7 is none")
            if how.startswith("exit"):
                sys.exit({"exit": 5, "exit True": True}[how])
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def be_impatient() -> None:
    """Wait for a rank that does not respond for less long than in earnest."""
    for module in (failure, rendezvous):
        module.REPORT_SECONDS = 4.0
        module.LATE_SECONDS = 1.0
    failure.LEAST_SILENCE_SECONDS = 8.0
    rendezvous.VERDICT_SECONDS = 1.0
    peers.ROLL_CALL_SECONDS = 1.0


def end_silently(pipe: Connection, victim: int, how: str, backend_seconds: float = 60.0) -> None:
    """One rank ends without a report, or stops, while the others wait for it in a collective."""
    be_impatient()
    with init_distributed(timeout_seconds=backend_seconds) as world:
        dist.barrier()
        if world.rank == victim:
            tell(pipe, "ready")
            end_like(how)
        dist.barrier()


def end_outside_a_collective(pipe: Connection, victim: int, how: str) -> None:
    """One rank ends without a report, or stops, while the others are busy for long."""
    be_impatient()
    with init_distributed(timeout_seconds=4.0) as world:
        dist.barrier()
        if world.rank == victim:
            end_like(how)
        threading.Event().wait(600)


def fail_inside_nccl(pipe: Connection) -> None:
    """Rank 1's group reports an error, as NCCL's does, while its main thread is busy."""
    be_impatient()
    if os.environ["RANK"] == "1":
        failure.group_error_reader = lambda device: lambda: "TIMEOUT"
    with init_distributed(timeout_seconds=4.0):
        threading.Event().wait(600)


def end_like(how: str) -> None:
    """End this process without a report, or stop it."""
    if how.startswith("exit "):
        os._exit(int(how.removeprefix("exit ")))
    os.kill(os.getpid(), getattr(signal, how))
    threading.Event().wait(600)


def stop_before(pipe: Connection, moment: str, seconds: float = 5.0) -> None:
    """Rank 0 stops before the others have met or left."""
    be_impatient()
    is_rank_0 = os.environ["RANK"] == "0"
    if moment == "verdict" and is_rank_0:
        rendezvous.find_errors = lambda facts: end_like("SIGSTOP")
    with init_distributed(rendezvous_seconds=seconds):
        dist.barrier()
        if moment == "leaving" and is_rank_0:
            end_like("SIGSTOP")
        time.sleep(1)


def leave_early(pipe: Connection, leaver: int, rest: str) -> None:
    """One rank leaves in order, the others go on with a collective or alone for three seconds."""
    be_impatient()
    with init_distributed(timeout_seconds=6.0) as world:
        dist.barrier()
        if world.rank == leaver:
            return
        if rest == "collective":
            dist.barrier()
        else:
            time.sleep(3)


def lose_the_link(pipe: Connection, namespaces: list[str], moment: str) -> None:
    """Reports ``ready`` to have the link cut, at that moment, and goes on at the next message."""
    be_impatient()
    rank = int(os.environ["RANK"])
    with open(f"/run/netns/{namespaces[rank]}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0

    def wait_for_the_cut() -> None:
        tell(pipe, "ready")
        pipe.recv_bytes()

    find_errors = rendezvous.find_errors

    def find_errors_late(facts: object) -> list[str]:
        wait_for_the_cut()
        return find_errors(facts)

    if moment == "meeting":
        rendezvous.find_errors = find_errors_late
    with init_distributed(timeout_seconds=3.0, rendezvous_seconds=20.0):
        dist.barrier()
        if rank == 0:
            wait_for_the_cut()
        else:
            pipe.recv_bytes()
        if moment == "collective":
            dist.barrier()


def end_while_rank_0_waits(pipe: Connection, how: str) -> None:
    """Rank 1 ends without a report after the last collective, while rank 0 waits for it."""
    be_impatient()
    with init_distributed() as world:
        dist.barrier()
        if world.rank == 1:
            time.sleep(0.5)
            end_like(how)


def fail_without_collective(pipe: Connection) -> None:
    """Rank 1 fails while rank 0 is busy with something else for a long time."""
    with init_distributed() as world:
        dist.barrier()
        if world.rank == 1:
            raise ValueError("a bad sample")
        threading.Event().wait(600)


def fail_after_rank_0_has_left(pipe: Connection) -> None:
    """Rank 1 is late, and fails."""
    with init_distributed() as world:
        dist.barrier()
        if world.rank == 1:
            time.sleep(1)
            raise ValueError("the last metrics cannot be written")


def be_late(pipe: Connection, timeout_seconds: float) -> None:
    """Rank 1 leaves three seconds after rank 0."""
    rendezvous.REPORT_SECONDS = 0.5
    with init_distributed(timeout_seconds=timeout_seconds) as world:
        dist.barrier()
        if world.rank == 1:
            time.sleep(3)


def gloo_on_a_machine_with_gpus(pipe: Connection) -> tuple[str, int, Precision]:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 4
    with init_distributed(backend="gloo") as world:
        return str(world.device), world.ranks[0].visible_gpus, choose_precision("auto", world.ranks)


def join_twice(pipe: Connection) -> tuple[bool, str]:
    """Whether the group is closed after the first time, and the result of the second time."""
    with init_distributed():
        pass
    return dist.is_initialized(), join(pipe)


def signalled_before_the_meeting(pipe: Connection) -> bool:
    """Rank 0 gets SIGUSR2 while it waits for rank 1, which comes when it is told to."""

    def signal_self() -> None:
        while signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)
        tell(pipe, "signalled")

    if os.environ["RANK"] == "0":
        threading.Thread(target=signal_self, daemon=True).start()
    else:
        pipe.recv_bytes()
    with init_distributed() as world:
        return world.stop_requested


def meet_and_stay(pipe: Connection) -> None:
    with init_distributed():
        tell(pipe, "met")
        threading.Event().wait(600)


def meet_and_leave_when_told(pipe: Connection) -> str:
    with init_distributed():
        tell(pipe, "met")
        pipe.recv_bytes()
        return "left"


def exchange_values(pipe: Connection) -> tuple[list[Any], list[Any], Any]:
    """What a rank gets from all, what rank 0 gets, and what it gets from rank 0."""
    with init_distributed() as world:
        own = ["x" * 1000 * world.rank, world.rank]
        return (
            all_gather_values(own, world.control),
            gather_values(own, world.control),
            broadcast_value(own, world.control),
        )


def env_after_meeting(pipe: Connection) -> tuple[RankEnv, RankEnv]:
    """The RankEnv that the launcher set, and the world's."""
    with init_distributed() as world:
        dist.barrier()
        return RankEnv.from_environ(), world.env


CLONE_NEWNET = 0x40000000


class SleepyModel(nn.Module):
    """A model that takes so many seconds a sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds * len(inputs))
        outputs: Tensor = self.layer(inputs)
        return outputs


def ask_for_shares(pipe: Connection, seconds_per_sample: list[float], kind: str) -> list[int] | str:
    """The shares of 10 samples for ranks that take so long a sample, or the text of the error."""
    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    data = {
        "batch": (inputs, targets),
        "data set": TensorDataset(inputs, targets),
        "list": list(zip(inputs, targets, strict=True)),
        "stream": iter([]),
        "empty": TensorDataset(inputs[:0], targets[:0]),
    }
    with init_distributed() as world:
        model = SleepyModel(seconds_per_sample[world.rank])
        before = [parameter.clone() for parameter in model.parameters()]
        try:
            if kind == "planned":
                return world.planned_shares(10)
            shares = world.shares(10, model, cross_entropy, data[kind])
        except DdpSlurmError as error:
            return str(error)
        assert all(map(torch.equal, before, model.parameters()))
        return shares


def place(pipe: Connection) -> tuple[int, str, int, list[str], list[int]]:
    with init_distributed() as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        return (
            int(total),
            world.backend,
            world.rank,
            [fact.place for fact in world.ranks],
            world.planned_shares(341),
        )
