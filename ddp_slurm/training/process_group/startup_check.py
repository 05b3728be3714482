"""What every rank tells the others before the first collective, and what may be wrong with it.

No torch.distributed here: the facts travel through the rendezvous store, so a wrong world is named within seconds
instead of hanging in a collective.
"""

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ddp_slurm.hostlist import expand_tasks_per_node
from ddp_slurm.rank_env import LaunchError, RankEnv


@dataclass(frozen=True)
class RankFacts:
    """One rank as it found itself. ``gpu_uuid`` is empty on a CPU; ``compute_capability`` is (0, 0) there."""

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


def gather_own_facts(
    env: RankEnv, environ: Mapping[str, str] = os.environ, *, use_gpus: bool = True
) -> RankFacts:
    """The facts of this process; those of one without GPUs where none is to be used."""
    visible = torch.cuda.device_count() if use_gpus and torch.cuda.is_available() else 0
    name, uuid, capability = "cpu", "", (0, 0)
    if env.device_index < visible:
        properties = torch.cuda.get_device_properties(env.device_index)
        name, capability = properties.name, (properties.major, properties.minor)
        uuid = str(getattr(properties, "uuid", ""))
    host = socket.gethostname()
    return RankFacts(
        rank=env.rank,
        local_rank=env.local_rank,
        node_rank=env.node_rank,
        world_size=env.world_size,
        host=host,
        node_name=node_name(environ),
        host_address=address_of(host),
        visible_gpus=visible,
        device_index=env.device_index,
        device_name=name,
        gpu_uuid=uuid,
        compute_capability=capability,
        socket_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
    )


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name that the plan and Slurm have for this host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def address_of(host: str) -> str:
    """The first address that a host name resolves to, or "" where it does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether only this host answers at it; False for a host name."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def check_launch(env: RankEnv, environ: Mapping[str, str] = os.environ) -> None:
    """What a rank can see wrong alone, before it looks for the others. Raises LaunchError."""
    place = f"rank {env.rank} on {node_name(environ)}"
    expected = environ.get("DDP_SLURM_WORLD_SIZE")
    if expected is not None and expected != str(env.world_size):
        raise LaunchError(
            f"{place}: expected a world of {expected} ranks (DDP_SLURM_WORLD_SIZE, the plan), got {env.world_size}. "
            "Only some components were started? A bare srun starts component 0 alone"
        )
    address = address_of(env.master_addr)
    if not address:
        raise LaunchError(
            f"{place}: the host of rank 0, {env.master_addr!r}, does not resolve here; add it to /etc/hosts or set "
            "MASTER_ADDR to its IP address"
        )
    on_purpose = env.master_addr == "localhost" or is_loopback(
        env.master_addr
    )  # all "nodes" on one machine
    if is_loopback(address) and env.node_rank > 0 and not on_purpose:
        raise LaunchError(
            f"{place}: the host of rank 0, {env.master_addr!r}, resolves to {address} here, which is this host itself; "
            "mend its line in /etc/hosts or set MASTER_ADDR to its address in the network"
        )


def find_faults(facts: Sequence[RankFacts], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Everything wrong with a world that has met, each as a sentence with rank, host, expected and found."""
    return [
        *_wrong_sizes(facts),
        *_wrong_tasks_per_node(facts, environ.get("DDP_SLURM_TASKS_PER_NODE")),
        *_missing_gpus(facts),
        *_shared_gpus(facts),
        *_unreachable_hosts(facts),
    ]


def _wrong_sizes(facts: Sequence[RankFacts]) -> list[str]:
    return [
        f"{fact.place}: has world size {fact.world_size}, expected {len(facts)} as on rank 0"
        for fact in facts
        if fact.world_size != len(facts)
    ]


def _wrong_tasks_per_node(facts: Sequence[RankFacts], planned: str | None) -> list[str]:
    if planned is None:
        return []
    expected = expand_tasks_per_node(planned)
    found = Counter(fact.node_rank for fact in facts)
    faults = []
    for node in sorted({*found, *range(len(expected))}):
        want = expected[node] if node < len(expected) else 0
        if found[node] != want:
            names = sorted({fact.node_name for fact in facts if fact.node_rank == node}) or [
                "no host"
            ]
            ranks = [fact.rank for fact in facts if fact.node_rank == node]
            faults.append(
                f"node {node} ({', '.join(names)}): expected {want} ranks (DDP_SLURM_TASKS_PER_NODE={planned}), "
                f"found {found[node]}: {ranks}"
            )
    return faults


def _missing_gpus(facts: Sequence[RankFacts]) -> list[str]:
    if not any(fact.visible_gpus for fact in facts):
        return []
    faults = []
    for fact in facts:
        if fact.device_index >= fact.visible_gpus:
            other = next(f for f in facts if f.visible_gpus)
            faults.append(
                f"{fact.place}: expected a GPU of index {fact.device_index}, found {fact.visible_gpus} visible GPUs "
                f"(CUDA_VISIBLE_DEVICES, driver?), while {other.place} sees {other.visible_gpus}"
            )
    return faults


def _shared_gpus(facts: Sequence[RankFacts]) -> list[str]:
    owners: dict[str, RankFacts] = {}
    faults = []
    for fact in facts:
        if not fact.gpu_uuid:
            continue
        owner = owners.setdefault(fact.gpu_uuid, fact)
        if owner is not fact:
            faults.append(
                f"{owner.place} and {fact.place} use the same GPU {fact.device_name} {fact.gpu_uuid} (index "
                f"{owner.device_index} and {fact.device_index}); expected one rank a GPU"
            )
    return faults


def _unreachable_hosts(facts: Sequence[RankFacts]) -> list[str]:
    if len({fact.host for fact in facts}) < 2:
        return []
    return [
        f"{fact.place}: its host name {fact.host!r} resolves to {fact.host_address or 'nothing'}, where no other host "
        "can reach it; mend its line in /etc/hosts (Ubuntu writes 127.0.1.1 there) or name the network interface "
        "(interface: in cluster.yaml, or GLOO_SOCKET_IFNAME)"
        for fact in facts
        if not fact.socket_interface and (not fact.host_address or is_loopback(fact.host_address))
    ]


def facts_to_dict(facts: RankFacts) -> dict[str, Any]:
    """As JSON can carry them."""
    return asdict(facts)


def facts_from_dict(values: dict[str, Any]) -> RankFacts:
    """What ``facts_to_dict`` was given, from the other side of JSON, which knows no tuples."""
    return RankFacts(**{**values, "compute_capability": tuple(values["compute_capability"])})
