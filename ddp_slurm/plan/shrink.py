"""``--shrink``: leave out the nodes on which Slurm starts no job now."""

from collections.abc import Sequence
from typing import NamedTuple

from ddp_slurm.cluster import Cluster
from ddp_slurm.console import say
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.values import AUTO
from ddp_slurm.plan.plan import PlanError
from ddp_slurm.slurm_client.commands import ask_slurm
from ddp_slurm.slurm_client.records import NodeRecord, read_nodes

SHOW_NODES = ("scontrol", "--all", "show", "node")
"""With --all also the nodes of hidden partitions."""


class Shrunk(NamedTuple):
    """The options for the nodes that are left, and a line for each thing that was left out."""

    options: JobOptions
    left_out: list[str]


def shrink(cluster: Cluster, options: JobOptions) -> JobOptions:
    """The options with only nodes that Slurm can use now; what is left out is named on stderr.

    The global batch stays: the nodes that are left share it. Raises PlanError where Slurm does not
    respond, and where no node with a GPU is left.
    """
    answer = ask_slurm(SHOW_NODES)
    if answer.status:
        raise PlanError(f"--shrink: {' '.join(SHOW_NODES)}: {answer.text or 'failed'}")
    shrunk = usable_part(cluster, options, read_nodes(answer.out))
    for line in shrunk.left_out:
        say(line)
    return shrunk.options


def usable_part(cluster: Cluster, options: JobOptions, records: Sequence[NodeRecord]) -> Shrunk:
    """The part of the job that runs on nodes whose records allow it. Raises PlanError."""
    by_name = {record.name: record for record in records}
    gpus = {node.name: node.gpu_count for node in cluster.nodes if node.gpu_count}
    named = options.nodes or ()
    if options.picks_nodes:
        named = named[1:]
    chosen = named or tuple(gpus)
    # Names that the cluster does not have stay: the planner refuses them.
    errors = {name: _why_unusable(by_name.get(name)) for name in chosen if name in gpus}
    left = tuple(name for name in chosen if errors.get(name) is None)
    if left == chosen:
        return Shrunk(options, [])
    left_out = [f"left out: {name}: {error}" for name, error in errors.items() if error]
    available = sum(gpus.get(name, 0) for name in left)
    if not available:
        raise PlanError("\n".join([*left_out, "--shrink: no node with a GPU is left"]))
    changed = options.replaced(nodes=(AUTO, *left) if options.picks_nodes else left)
    if options.gpus is not None and options.gpus > available:
        left_out.append(f"--gpus: {options.gpus} asked for, {available} are left")
        changed = changed.replaced(gpus=available)
    return Shrunk(changed, left_out)


def _why_unusable(record: NodeRecord | None) -> str | None:
    return record.why_unavailable if record else "Slurm does not know it"
