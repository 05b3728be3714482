"""The limits of partitions that keep a job waiting for ever.

Slurm takes such a job, unless slurm.conf has EnforcePartLimits, and leaves it PENDING.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_slurm.slurm_client.records import PartitionRecord


@dataclass(frozen=True)
class Wanted:
    """What a component of a job asks of its partition; None where it leaves that to Slurm."""

    partition: str | None
    nodes: int
    minutes: int | None
    account: str | None
    user: str
    groups: frozenset[str]
    """Those of the user."""


def conflicts(wanted: Wanted, partitions: Sequence[PartitionRecord]) -> list[str]:
    """A sentence for each limit of the partition that the component does not keep."""
    for partition in partitions:
        is_default = wanted.partition is None and partition.is_default
        if is_default or partition.name == wanted.partition:
            return [f"partition {partition.name!r}: {text}" for text in _of(wanted, partition)]
    return []


def _of(wanted: Wanted, partition: PartitionRecord) -> Iterator[str]:
    if partition.state != "UP":
        yield f"its state is {partition.state}"
    if partition.max_nodes is not None and wanted.nodes > partition.max_nodes:
        yield f"{wanted.nodes} nodes in a component; MaxNodes is {partition.max_nodes}"
    limit = partition.max_minutes
    if limit is not None and wanted.minutes is not None and wanted.minutes > limit:
        yield f"--time is {wanted.minutes} minutes; MaxTime is {limit} minutes"
    accounts = partition.allowed_accounts
    if accounts and wanted.account is not None and wanted.account not in accounts:
        yield f"--account {wanted.account}; AllowAccounts is {','.join(accounts)}"
    if not allows_user(partition, wanted.user, wanted.groups):
        groups = ",".join(partition.allowed_groups)
        yield f"{wanted.user} is in none of its AllowGroups, {groups}"


def allows_user(partition: PartitionRecord, user: str, groups: frozenset[str]) -> bool:
    """Whether the partition takes jobs of a user; root may use all."""
    allowed = partition.allowed_groups
    return not allowed or user == "root" or not groups.isdisjoint(allowed)
