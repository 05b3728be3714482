"""From a cluster and a job's options to a plan. Pure: opens no file and asks nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from ddp_slurm.cluster.machines import Cluster, GpuModel, Node
from ddp_slurm.errors import did_you_mean
from ddp_slurm.job.memory_option import Memory
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.values import AUTO
from ddp_slurm.plan.plan import Component, Plan, PlanError
from ddp_slurm.plan.prediction import boxes_of, network_of, planned_step
from ddp_slurm.plan.shares import planned_shares
from ddp_slurm.predict import fastest

MAX_NAMES = 5
"""Nodes that a message names."""


class UsedNode(NamedTuple):
    """A node of the job, and the number of its GPUs that the job uses."""

    node: Node
    gpu_count: int


def make_plan(cluster: Cluster, options: JobOptions) -> Plan:
    """Decide who runs where.

    Components come in the order of their first node in the file (or in ``options.nodes``), the
    nodes of one in Slurm's order of names; the first of all is the host of rank 0. Raises PlanError
    where the options ask for nodes, GPUs or speeds that do not exist.
    """
    _check_relative_speeds(cluster, options)
    if options.picks_nodes:
        options = options.replaced(nodes=_fastest_nodes(cluster, options))
    components = _components(_used_nodes(cluster, options), options)
    by_name = {node.name: node for node in cluster.nodes}
    shares = planned_shares(components, options)
    step = planned_step(components, options, shares)
    return Plan(
        cluster_name=cluster.name,
        components=components,
        options=options,
        shares=shares,
        predicted_step=step and float(f"{step.seconds:.6g}"),
        bucket_bytes=step and step.bucket_bytes,
        machines=tuple(by_name[name] for component in components for name in component.nodes),
    )


def _check_relative_speeds(cluster: Cluster, options: JobOptions) -> None:
    """Raises PlanError for a name that the cluster does not have, which may be a typing error."""
    if not options.balance.is_relative or options.balance.speeds is None:
        return
    known = {node.name for node in cluster.nodes}
    known |= {model.type for node in cluster.nodes for model in node.gpus if model.type}
    for name in options.balance.speeds.entries:
        if name not in known:
            raise PlanError(
                f"--balance {options.balance}: {name!r} is neither a GPU type nor a node of "
                f"cluster {cluster.name!r}{did_you_mean(name, known)}"
            )


def _fastest_nodes(cluster: Cluster, options: JobOptions) -> tuple[str, ...]:
    """The names for ``--nodes auto``, in the order of the file."""
    batch = options.global_batch_size
    if options.balance.file is None or batch is None:
        raise PlanError(
            f"--nodes {AUTO} needs --global-batch-size N and --balance FILE, a file of speeds with "
            "the seconds of a step; ddp-slurm measure writes it"
        )
    if options.gpus is not None:
        raise PlanError(
            f"--nodes {AUTO} cannot be combined with --gpus, which takes the first GPUs in the "
            "order of the nodes"
        )
    assert options.nodes is not None
    candidates = options.nodes[1:] or tuple(n.name for n in cluster.nodes if n.gpu_count)
    options = options.replaced(nodes=candidates)
    components = _components(_used_nodes(cluster, options), options)
    best = fastest(batch, boxes_of(components, options), network_of(components, options))
    if best is None:
        raise PlanError(
            f"--nodes {AUTO}: the max_batch of all ranks add up to less than the global batch of "
            f"{batch}"
        )
    return tuple(name for name in candidates if name in best.names)


def _used_nodes(cluster: Cluster, options: JobOptions) -> Iterator[UsedNode]:
    nodes = _chosen_nodes(cluster, options)
    counts = [node.gpu_count for node in nodes]
    available = sum(counts)
    if not available:
        raise PlanError(f"--nodes: {_described(nodes)} have no GPU; choose others")
    wanted = options.gpus or available
    if wanted > available:
        raise PlanError(f"--gpus: {wanted} asked for, but {_described(nodes)} have {available}")
    for node, own in zip(nodes, counts, strict=True):
        count = min(own, wanted)
        if count:
            wanted -= count
            yield UsedNode(node, count)


def _chosen_nodes(cluster: Cluster, options: JobOptions) -> tuple[Node, ...]:
    if options.nodes is None:
        return cluster.nodes
    by_name = {node.name: node for node in cluster.nodes}
    unknown = [name for name in options.nodes if name not in by_name]
    if unknown:
        raise PlanError(_unknown_nodes(unknown, cluster))
    return tuple(by_name[name] for name in dict.fromkeys(options.nodes))


def _unknown_nodes(names: list[str], cluster: Cluster) -> str:
    known = [node.name for node in cluster.nodes]
    lines = [
        f"--nodes: {name!r} is not a node of cluster {cluster.name!r}{did_you_mean(name, known)}"
        for name in names[:MAX_NAMES]
    ]
    if len(names) > MAX_NAMES:
        lines.append(f"--nodes: nor are {len(names) - MAX_NAMES} others")
    return "\n".join(lines)


def _described(nodes: tuple[Node, ...]) -> str:
    names = ", ".join(node.name for node in nodes[:MAX_NAMES])
    more = f" and {len(nodes) - MAX_NAMES} more" if len(nodes) > MAX_NAMES else ""
    return f"the nodes {names}{more}"


def _components(used: Iterable[UsedNode], options: JobOptions) -> tuple[Component, ...]:
    names: dict[Component, list[str]] = {}
    # A shape is made once for neighbours that are alike: a large cluster has thousands of nodes.
    for _, group in groupby(used, key=_without_its_name):
        alike = list(group)
        shape = _shape(alike[0].node, alike[0].gpu_count, options)
        names.setdefault(shape, []).extend(one.node.name for one in alike)
    return tuple(
        replace(shape, nodes=tuple(sorted(nodes, key=slurm_order)))
        for shape, nodes in names.items()
    )


def _without_its_name(used: UsedNode) -> tuple[int, Node]:
    return used.gpu_count, used.node._replace(name="", address=None)


def _shape(node: Node, count: int, options: JobOptions) -> Component:
    """The component, still without nodes, of a node of which ``count`` GPUs are used."""
    one_rank_a_node = options.ranks == "node"
    cpus_per_task = options.cpus_per_task or _cpus_per_task(node, count, one_rank_a_node)
    ranks = 1 if one_rank_a_node else count
    has_too_few = not options.cpus_per_task and node.cpus is not None and node.cpus < ranks
    shared_cpus = node.cpus if has_too_few else None
    cpus = shared_cpus or cpus_per_task * ranks
    memory = options.memory or Memory(_memory_mb(node, count))
    return Component(
        nodes=(),
        gpus=_first_gpus(node.gpus, count),
        cpus_per_task=cpus_per_task,
        memory_mb=memory.mb * cpus if memory.mb and memory.per_cpu else memory.mb,
        memory_per_cpu_mb=memory.mb if memory.per_cpu else None,
        partition=options.partition or node.partition,
        constraint=node.constraint,
        interface=node.interface,
        env=node.env,
        one_rank_a_node=one_rank_a_node,
        shared_cpus=shared_cpus,
    )


def _first_gpus(models: tuple[GpuModel, ...], count: int) -> tuple[GpuModel, ...]:
    used = []
    for model in models:
        take = min(model.count, count)
        if take:
            used.append(GpuModel(type=model.type, count=take))
        count -= take
    return tuple(used)


def _cpus_per_task(node: Node, count: int, one_rank_a_node: bool) -> int:
    """Always given: srun's default is one core, and since 22.05 it does not inherit the job's."""
    gpus_of_a_rank = count if one_rank_a_node else 1
    return max(1, (node.cpus or 1) * gpus_of_a_rank // node.gpu_count)


def _memory_mb(node: Node, count: int) -> int | None:
    """The part of the node's memory that goes with ``count`` of its GPUs."""
    if node.memory_mb is None:
        return None
    return node.memory_mb * count // node.gpu_count


def slurm_order(name: str) -> tuple[str, int, str]:
    """Slurm's order of host names: by the text before the last number, then by that number."""
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return prefix, int(digits or -1), digits
