"""What may be wrong with a world: seen by one rank alone, or by rank 0 when all have met.

Nothing here communicates. A wrong world is named within seconds instead of hanging in the first
collective.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping, Sequence

from ddp_slurm import job_env
from ddp_slurm.hostlist import compress_tasks_per_node
from ddp_slurm.job_env import JobEnv
from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.process_group.facts import RankFacts, address_of, node_name


def is_loopback(address: str) -> bool:
    """Whether only this host can be reached at it; False for a host name."""
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def check_launch(env: RankEnv, environ: Mapping[str, str] = os.environ) -> None:
    """What a rank can find wrong by itself, before it looks for the others. Raises LaunchError."""
    place = f"rank {env.rank} on {node_name(environ)}"
    expected = JobEnv.from_environ(environ).world_size
    if expected not in (None, env.world_size):
        raise LaunchError(
            f"{place}: expected a world of {expected} ranks ({job_env.WORLD_SIZE}, the plan), "
            f"got {env.world_size}. Only some components were started? A bare srun starts "
            "component 0 alone"
        )
    address = address_of(env.master_addr)
    if not address:
        raise LaunchError(
            f"{place}: the host of rank 0, {env.master_addr!r}, does not resolve here; add it to "
            "/etc/hosts or set MASTER_ADDR to its IP address"
        )
    # all "nodes" on one machine
    on_purpose = env.master_addr == "localhost" or is_loopback(env.master_addr)
    elsewhere = env.node_rank is not None and env.node_rank > 0
    if is_loopback(address) and elsewhere and not on_purpose:
        raise LaunchError(
            f"{place}: the host of rank 0, {env.master_addr!r}, resolves to {address} here, which "
            "is this host itself; correct its line in /etc/hosts or set MASTER_ADDR to its address "
            "in the network"
        )


def find_errors(facts: Sequence[RankFacts], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Everything wrong with a world that has met, each as a sentence with rank, host, expected and
    found."""
    return [
        *_wrong_sizes(facts),
        *_wrong_tasks_per_node(facts, JobEnv.from_environ(environ).tasks_per_node),
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


def _wrong_tasks_per_node(facts: Sequence[RankFacts], planned: Sequence[int] | None) -> list[str]:
    if planned is None:
        return []
    variable = f"{job_env.TASKS_PER_NODE}={compress_tasks_per_node(planned)}"
    found = Counter(fact.node_rank for fact in facts)
    errors = []
    for node in sorted({*found, *range(len(planned))}):
        expected = planned[node] if node < len(planned) else 0
        if found[node] == expected:
            continue
        here = [fact for fact in facts if fact.node_rank == node]
        names = ", ".join(sorted({fact.node_name for fact in here})) or "no host"
        ranks = [fact.rank for fact in here]
        errors.append(
            f"node {node} ({names}): expected {expected} ranks ({variable}), "
            f"found {found[node]}: {ranks}"
        )
    return errors


def _missing_gpus(facts: Sequence[RankFacts]) -> list[str]:
    with_gpus = [fact for fact in facts if fact.visible_gpus]
    if not with_gpus:
        return []
    other = with_gpus[0]
    return [
        f"{fact.place}: expected a GPU of index {fact.device_index}, found {fact.visible_gpus} "
        f"visible GPUs (CUDA_VISIBLE_DEVICES, driver?), while {other.place} sees "
        f"{other.visible_gpus}"
        for fact in facts
        if fact.device_index >= fact.visible_gpus
    ]


def _shared_gpus(facts: Sequence[RankFacts]) -> list[str]:
    owners: dict[str, RankFacts] = {}
    errors = []
    for fact in facts:
        if not fact.gpu_uuid:
            continue
        owner = owners.setdefault(fact.gpu_uuid, fact)
        if owner is not fact:
            errors.append(
                f"{owner.place} and {fact.place} use the same GPU {fact.device_name} "
                f"{fact.gpu_uuid} (index {owner.device_index} and {fact.device_index}); "
                "expected one rank a GPU"
            )
    return errors


def _unreachable_hosts(facts: Sequence[RankFacts]) -> list[str]:
    if len({fact.host for fact in facts}) < 2:
        return []
    errors = []
    for fact in facts:
        is_reachable = fact.host_address and not is_loopback(fact.host_address)
        if is_reachable or fact.socket_interface:
            continue
        errors.append(
            f"{fact.place}: its host name {fact.host!r} resolves to "
            f"{fact.host_address or 'nothing'}, where no other host can reach it; correct its line "
            "in /etc/hosts (Ubuntu writes 127.0.1.1 there) or name the network interface "
            "(interface: in cluster.yaml, or GLOO_SOCKET_IFNAME)"
        )
    return errors
