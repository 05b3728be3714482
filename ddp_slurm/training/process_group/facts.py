"""What each rank reports about itself when the ranks meet, and what follows for all of them."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_slurm.rank_env import RankEnv, choose_device, count_visible_devices

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Gpu:
    """One GPU that a rank sees."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]


NO_GPU = Gpu("cpu", "", (0, 0))


@dataclass(frozen=True)
class Arrival:
    """One rank as it reports itself to rank 0, before anything is derived from the other ranks."""

    env: RankEnv
    host: str
    machine: str
    """Equal for ranks that share a host, and only for them: its name and the id of its boot."""
    node_name: str
    """The host's name in the plan and in Slurm."""
    host_address: str
    """The first address that the host's name resolves to, or ""."""
    gpus: tuple[Gpu, ...]
    visible_devices: int | None
    """GPUs that variables such as CUDA_VISIBLE_DEVICES leave; None where none is set."""
    socket_interface: str
    """GLOO_SOCKET_IFNAME, or ""."""

    @property
    def place(self) -> str:
        """``rank 3 on alpha``."""
        return f"rank {self.env.rank} on {self.node_name}"


@dataclass(frozen=True)
class RankFacts:
    """One rank of a world that has met. On a CPU ``gpu_uuid`` is empty and ``compute_capability``
    is (0, 0)."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    node_name: str
    host_address: str
    visible_gpus: int
    device_index: int
    device_name: str
    gpu_uuid: str
    compute_capability: tuple[int, int]
    socket_interface: str

    @property
    def place(self) -> str:
        return f"rank {self.rank} on {self.node_name}"


def describe_this_rank(
    env: RankEnv, environ: Mapping[str, str] = os.environ, *, use_gpus: bool = True
) -> Arrival:
    """This process's report; it has no GPUs where none is to be used."""
    count = torch.cuda.device_count() if use_gpus and torch.cuda.is_available() else 0
    host = socket.gethostname()
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return Arrival(
        env=env,
        host=host,
        machine=f"{host} {boot}",
        node_name=node_name(environ),
        host_address=address_of(host),
        gpus=tuple(_describe_gpu(index) for index in range(count)),
        visible_devices=count_visible_devices(environ),
        socket_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
    )


def _describe_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return Gpu(properties.name, uuid, (properties.major, properties.minor))


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name that the plan and Slurm have for this host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def address_of(host: str) -> str:
    """The first address that a host name resolves to, or "" where it does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""


def complete_envs(arrivals: Sequence[Arrival]) -> list[RankEnv]:
    """Each rank's RankEnv, in rank order, with every field set.

    What a launcher did not set for some rank is derived for all of them: ranks of one machine are
    one node, nodes count from that of rank 0, local ranks are in the order of ranks.
    """
    nodes: dict[str, list[int]] = {}
    for rank, arrival in enumerate(arrivals):
        nodes.setdefault(arrival.machine, []).append(rank)
    on_node = [nodes[arrival.machine] for arrival in arrivals]
    machines = list(nodes)
    derived: dict[str, list[Any]] = {
        "local_rank": [ranks.index(rank) for rank, ranks in enumerate(on_node)],
        "local_world_size": [len(ranks) for ranks in on_node],
        "node_rank": [machines.index(arrival.machine) for arrival in arrivals],
    }
    envs = [arrival.env for arrival in arrivals]
    for name, values in derived.items():
        if None in [getattr(env, name) for env in envs]:
            envs = [replace(env, **{name: value}) for env, value in zip(envs, values, strict=True)]
    return [_with_device(*pair) for pair in zip(envs, arrivals, strict=True)]


def _with_device(env: RankEnv, arrival: Arrival) -> RankEnv:
    if env.device_index is not None:
        return env
    assert env.local_rank is not None
    assert env.local_world_size is not None
    index = choose_device(env.local_rank, env.local_world_size, arrival.visible_devices)
    return replace(env, device_index=index)


def rank_facts(arrival: Arrival, env: RankEnv) -> RankFacts:
    """The facts of one rank, ``env`` being complete."""
    assert env.local_rank is not None
    assert env.node_rank is not None
    assert env.device_index is not None
    has_device = env.device_index < len(arrival.gpus)
    gpu = arrival.gpus[env.device_index] if has_device else NO_GPU
    return RankFacts(
        rank=env.rank,
        local_rank=env.local_rank,
        node_rank=env.node_rank,
        world_size=env.world_size,
        host=arrival.host,
        node_name=arrival.node_name,
        host_address=arrival.host_address,
        visible_gpus=len(arrival.gpus),
        device_index=env.device_index,
        device_name=gpu.name,
        gpu_uuid=gpu.uuid,
        compute_capability=gpu.compute_capability,
        socket_interface=arrival.socket_interface,
    )


def arrival_from_dict(values: dict[str, Any]) -> Arrival:
    """The opposite of ``asdict``, from the other side of JSON, which has no tuples."""
    gpus = [
        Gpu(gpu["name"], gpu["uuid"], tuple(gpu["compute_capability"])) for gpu in values["gpus"]
    ]
    return Arrival(**{**values, "env": RankEnv(**values["env"]), "gpus": tuple(gpus)})
