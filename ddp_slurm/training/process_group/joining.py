"""The start of a distributed training: who takes part is checked before the first collective."""

import atexit
import os
import time
from dataclasses import asdict

import torch.distributed as dist

from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.exchange import broadcast_value
from ddp_slurm.training.process_group.ending import die_with_torchrun, print_errors_plainly
from ddp_slurm.training.process_group.facts import RankFacts, describe_this_rank, node_name
from ddp_slurm.training.process_group.rendezvous import Meeting, join_store, meet
from ddp_slurm.training.process_group.start_group import (
    set_device,
    start_process_group,
    watch_for_failure,
)
from ddp_slurm.training.process_group.startup_check import check_launch
from ddp_slurm.training.process_group.stop_signal import catch_stop_signal
from ddp_slurm.training.process_group.world import World

_joined = False
"""Whether this process has been part of a world."""


def init_distributed(
    *,
    backend: str | None = None,
    timeout_seconds: float = 600.0,
    rendezvous_seconds: float = 180.0,
) -> World:
    """Join this process to the world that srun, torchrun or the local backend started.

    In this order: RankEnv from the environment, the meeting of all ranks at rank 0's store, the
    check of what they found against the plan (the job's variables, ``job_env``), the device, and
    only then the process group.

    Args:
        backend: ``nccl`` or ``gloo``; None takes nccl where every rank has a GPU.
        timeout_seconds: the longest that any collective may take.
        rendezvous_seconds: the longest to wait for all ranks to arrive.

    SIGUSR2, which the job's time limit sends ahead, sets ``World.stop_requested`` from the first
    line on instead of ending the process: the ranks then meet, and stop after one step. An
    exception that nobody catches ends all ranks, see ``failure``.

    Raises LaunchError on every rank, with rank, host, expected and found, for a world that is not
    the planned one. A process can join one world only: rank 0's store, which may still have
    readers, keeps the port.
    """
    global _joined
    started = time.monotonic()
    die_with_torchrun()
    catch_stop_signal()
    print_errors_plainly(f"process {os.getpid()} on {node_name()}")
    env = RankEnv.from_environ()
    print_errors_plainly(f"rank {env.rank} on {node_name()}")
    _check_joins_once(env)
    check_launch(env)
    arrival = describe_this_rank(env, use_gpus=backend != "gloo")
    store = join_store(arrival, rendezvous_seconds)
    _joined = True
    meeting = meet(store, arrival, rendezvous_seconds)
    watch = watch_for_failure(meeting, arrival, rendezvous_seconds, timeout_seconds)
    device = set_device(meeting.env, arrival)
    backend = backend or ("nccl" if arrival.gpus else "gloo")
    control = start_process_group(meeting, backend, device, timeout_seconds)
    ranks = _share_facts(meeting, control)
    if watch is not None:
        watch.peers.places = [fact.place for fact in ranks]
        watch.look_at_group(device)
    world = World(
        env=meeting.env,
        device=device,
        backend=backend,
        control=control,
        ranks=ranks,
        rendezvous_seconds=time.monotonic() - started,
        _watch=watch,
    )
    atexit.register(world._leave_at_exit, os.getpid())
    return world


def _check_joins_once(env: RankEnv) -> None:
    if _joined:
        raise LaunchError(
            f"rank {env.rank}: init_distributed was called a second time in this process; use the "
            "world of the first call"
        )


def _share_facts(meeting: Meeting, control: dist.ProcessGroup) -> list[RankFacts]:
    # By broadcast and not through the store, which would send it from one socket to each rank.
    rows = broadcast_value([asdict(fact) for fact in meeting.facts], control)
    return [RankFacts(**values) for values in rows]
