"""A warning at the submission of a job that its partition will not start."""

from ddp_slurm.console import say
from ddp_slurm.plan import Plan
from ddp_slurm.schema.fields import limit_seconds
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.partition_limits import Wanted, conflicts
from ddp_slurm.slurm_client.records import read_partitions
from ddp_slurm.user import group_names, user_name

SHOW_PARTITIONS = ("scontrol", "--all", "show", "partition")
"""``--all``: also those that this user's groups cannot use."""
PARTITION_SECONDS = 5
"""The limit of the question: without an answer the job is submitted without a warning."""


def warn_of_partition_limits(plan: Plan) -> None:
    """Report the limits of its partitions that a job does not keep.

    A warning only: an administrator may have given its account or QOS more.
    """
    answer = ask_slurm(SHOW_PARTITIONS, timeout_seconds=PARTITION_SECONDS)
    partitions = read_partitions(answer.out) if answer.status == 0 else []
    options = plan.options
    seconds = limit_seconds(options.time) if options.time else None
    texts: dict[str, None] = {}  # each once, in order
    for component in plan.components:
        wanted = Wanted(
            partition=component.partition or options.partition,
            nodes=len(component.nodes),
            minutes=None if seconds is None else -(-seconds // 60),
            account=options.account,
            user=user_name(),
            groups=group_names(),
        )
        texts.update(dict.fromkeys(conflicts(wanted, partitions)))
    for text in texts:
        say(f"warning: {text}: the job may never start")
