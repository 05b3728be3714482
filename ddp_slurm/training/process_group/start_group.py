"""What a rank starts when all have met: the watch for failures, its device, the process group."""

from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_slurm.rank_env import RankEnv
from ddp_slurm.training.process_group.facts import Arrival
from ddp_slurm.training.process_group.failure import FailureWatch
from ddp_slurm.training.process_group.peers import Peers
from ddp_slurm.training.process_group.rendezvous import Meeting
from ddp_slurm.training.process_group.store import connect_again, group_store


def watch_for_failure(
    meeting: Meeting, arrival: Arrival, rendezvous_seconds: float, timeout_seconds: float
) -> FailureWatch | None:
    """None in a world of one rank."""
    env = meeting.env
    if env.world_size == 1:
        return None
    places = [f"rank {rank}" for rank in range(env.world_size)]
    places[0] = f"rank 0 on {env.master_addr}"
    places[env.rank] = arrival.place
    waiting_store = connect_again(meeting.store, env, rendezvous_seconds)
    watch = FailureWatch(Peers(env.rank, places, meeting.store, waiting_store), timeout_seconds)
    watch.start()
    return watch


def set_device(env: RankEnv, arrival: Arrival) -> torch.device:
    if not arrival.gpus:
        return torch.device("cpu")
    assert env.device_index is not None
    device = torch.device("cuda", env.device_index)
    # before the group starts: NCCL's barrier takes the current device
    torch.cuda.set_device(device)
    return device


def start_process_group(
    meeting: Meeting, backend: str, device: torch.device, timeout_seconds: float
) -> dist.ProcessGroup:
    """The default group; returns a gloo group over the same ranks."""
    limit = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend,
        store=group_store(meeting.store, meeting.env, backend, timeout_seconds),
        rank=meeting.env.rank,
        world_size=meeting.env.world_size,
        timeout=limit,
        device_id=device if backend == "nccl" else None,
    )
    is_gloo = backend == "gloo"
    control = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo", timeout=limit)
    assert isinstance(control, dist.ProcessGroup)
    return control
