"""Who runs where: the nodes grouped into components of one shape, a rank for each GPU, shares of the global batch.

Pure: takes a Cluster and JobOptions, returns a Plan, runs and reads nothing but the file of speeds it is given.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, repeat
from pathlib import Path

from ddp_slurm.balance import apportion, equal_shares, split_batch
from ddp_slurm.cluster.machines import Cluster, GpuModel, Node, gres_text
from ddp_slurm.errors import DdpSlurmError, counted, did_you_mean
from ddp_slurm.hostlist import compress_hostlist, compress_tasks_per_node
from ddp_slurm.job.options import JobOptions
from ddp_slurm.schema.fields import positive_number, seconds, word
from ddp_slurm.schema.schema import Schema, key, mapping_of
from ddp_slurm.schema.yaml_file import load_yaml, validate


class PlanError(DdpSlurmError):
    """What was asked for does not fit the cluster."""


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes of one shape: one component of a heterogeneous job, one segment of its srun."""

    nodes: tuple[str, ...]
    """In the order in which Slurm hands out ranks within a component: by name, numbers as numbers."""
    gpus: tuple[GpuModel, ...]
    """Those that the job uses on each node."""
    cpus_per_task: int
    memory_mb: int | None
    """Memory on each node, MiB."""
    partition: str | None
    constraint: str | None
    interface: str | None
    env: tuple[tuple[str, str], ...]
    one_rank_a_node: bool
    """One rank drives all GPUs of its node."""

    @property
    def gpus_per_node(self) -> int:
        return sum(model.count for model in self.gpus)

    @property
    def tasks_per_node(self) -> int:
        return 1 if self.one_rank_a_node else self.gpus_per_node

    @property
    def tasks(self) -> int:
        return self.tasks_per_node * len(self.nodes)

    @property
    def gres(self) -> str:
        return gres_text(self.gpus)

    @property
    def nodelist(self) -> str:
        return compress_hostlist(self.nodes)

    @property
    def task_env(self) -> dict[str, str]:
        """Variables of this component's ranks. NCCL's leading = asks for exactly this interface, not for a prefix."""
        if self.interface is None:
            return dict(self.env)
        return {
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "GLOO_SOCKET_IFNAME": self.interface,
            **dict(self.env),
        }


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """One process of the job."""

    rank: int
    component: int
    node: str
    node_rank: int
    local_rank: int
    gpu_type: str | None
    share: int | None
    """Samples of each global batch; None where that is decided at run time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A job on a cluster, decided down to the rank."""

    cluster_name: str
    components: tuple[Component, ...]
    options: JobOptions
    shares: tuple[int, ...] | None
    """Samples of the global batch for each rank."""
    machines: tuple[Node, ...]
    """The nodes in the order of node ranks, as cluster.yaml describes them."""

    @property
    def name(self) -> str:
        return self.options.name or self.cluster_name

    @property
    def world_size(self) -> int:
        return sum(component.tasks for component in self.components)

    @property
    def node_count(self) -> int:
        return sum(len(component.nodes) for component in self.components)

    @property
    def size(self) -> str:
        """``7 ranks on 3 nodes``, for a person."""
        return f"{counted(self.world_size, 'rank')} on {counted(self.node_count, 'node')}"

    @property
    def tasks_per_node(self) -> str:
        """Tasks on each node in the order of node ranks, ``1,2(x3)``."""
        return compress_tasks_per_node(
            chain.from_iterable(repeat(c.tasks_per_node, len(c.nodes)) for c in self.components)
        )

    @property
    def first_nodes(self) -> tuple[int, ...]:
        """The node rank of each component's first node."""
        return (0, *accumulate(len(component.nodes) for component in self.components))[:-1]

    def with_output(self, path: str) -> "Plan":
        return replace(self, options=self.options.replaced(output=path))

    def ranks(self) -> Iterator[PlannedRank]:
        """Every rank, in order."""
        rank = 0
        for index, component in enumerate(self.components):
            types = [model.type for model in component.gpus for _ in range(model.count)][
                : component.tasks_per_node
            ]
            for i, node in enumerate(component.nodes):
                for local_rank, gpu_type in enumerate(types):
                    share = self.shares[rank] if self.shares else None
                    yield PlannedRank(
                        rank, index, node, self.first_nodes[index] + i, local_rank, gpu_type, share
                    )
                    rank += 1

    def step_env(self) -> dict[str, str]:
        """What every rank is told of the plan, to check the world that it meets against."""
        options = self.options
        env = {
            "DDP_SLURM_WORLD_SIZE": str(self.world_size),
            "DDP_SLURM_TASKS_PER_NODE": self.tasks_per_node,
        }
        if options.global_batch_size is not None:
            env["DDP_SLURM_GLOBAL_BATCH_SIZE"] = str(options.global_batch_size)
        if self.shares is not None:
            env["DDP_SLURM_SHARES"] = compress_tasks_per_node(self.shares)
        env["DDP_SLURM_BALANCE"] = (
            options.balance if options.balance in ("equal", "measured") else "planned"
        )
        return env


def make_plan(cluster: Cluster, options: JobOptions) -> Plan:
    """Decide who runs where.

    Components come in the order of their first node in the file (or in ``options.nodes``), the nodes of one in Slurm's
    order of names; the first of all is the host of rank 0. Raises PlanError where the options ask for nodes or GPUs
    that are not there.
    """
    groups: dict[Component, list[str]] = {}
    for _, alike in groupby(
        _chosen_nodes(cluster, options), key=_what_shapes
    ):  # each shape is made once, not per node
        same = list(alike)
        groups.setdefault(_shape(*same[0], options), []).extend(node.name for node, _ in same)
    components = tuple(
        replace(shape, nodes=tuple(sorted(names, key=_natural))) for shape, names in groups.items()
    )
    by_name = {node.name: node for node in cluster.nodes}
    machines = tuple(by_name[name] for component in components for name in component.nodes)
    plan = Plan(cluster.name, components, options, None, machines)
    return replace(plan, shares=_shares(plan, options))


def _chosen_nodes(cluster: Cluster, options: JobOptions) -> Iterator[tuple[Node, int]]:
    """The nodes to use, each with the number of GPUs to use on it."""
    nodes = cluster.nodes
    if options.nodes is not None:
        by_name = {node.name: node for node in cluster.nodes}
        for name in options.nodes:
            if name not in by_name:
                raise PlanError(
                    f"--nodes: {name!r} is not a node of cluster {cluster.name!r}{did_you_mean(name, list(by_name))}"
                )
        nodes = tuple(by_name[name] for name in dict.fromkeys(options.nodes))
    counted = [(node, node.gpu_count) for node in nodes]
    available = sum(count for _, count in counted)
    if not available:
        raise PlanError(f"--nodes: {_described(nodes)} have no GPU; choose others")
    wanted = options.gpus or available
    if wanted > available:
        raise PlanError(f"--gpus: {wanted} asked for, but {_described(nodes)} have {available}")
    for node, present in counted:
        count = min(present, wanted)
        if count:
            wanted -= count
            yield node, count


def _what_shapes(chosen: tuple[Node, int]) -> tuple[object, ...]:
    node, count = chosen
    return (
        count,
        node.gpus,
        node.cpus,
        node.memory_mb,
        node.partition,
        node.constraint,
        node.interface,
        node.env,
    )


def _described(nodes: tuple[Node, ...]) -> str:
    names = ", ".join(node.name for node in nodes[:5])
    return f"the nodes {names}" + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")


def _first_gpus(models: tuple[GpuModel, ...], count: int) -> tuple[GpuModel, ...]:
    used = []
    for model in models:
        take = min(model.count, count)
        if take:
            used.append(GpuModel(type=model.type, count=take))
        count -= take
    return tuple(used)


def _shape(node: Node, count: int, options: JobOptions) -> Component:
    """The component, still without nodes, of a node that gives ``count`` GPUs."""
    by_gpu = options.ranks == "gpu"
    memory_mb = options.memory or (node.memory_mb and node.memory_mb * count // node.gpu_count)
    return Component(
        nodes=(),
        gpus=_first_gpus(node.gpus, count),
        # srun gives each rank one core where nothing is said, and since 22.05 does not inherit it from the job
        cpus_per_task=options.cpus_per_task
        or max(1, (node.cpus or 1) * (1 if by_gpu else count) // node.gpu_count),
        memory_mb=memory_mb,
        partition=options.partition or node.partition,
        constraint=node.constraint,
        interface=node.interface,
        env=node.env,
        one_rank_a_node=not by_gpu,
    )


def _natural(name: str) -> tuple[str, int, str]:
    """Slurm's order of host names: by the text before the last number, then by that number."""
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return prefix, int(digits or -1), digits


@dataclass(frozen=True, init=False)
class Speed(Schema):
    """Seconds of one optimizer step on a GPU that gets n samples: ``alpha + beta * n``.

    A rank that drives all GPUs of its node shares its samples out to them, whichever name its speed was found under.
    """

    alpha: float = key(seconds, 0.0)
    beta: float = key(seconds)
    max_batch: int | None = key(positive_number, None)


read_speeds = mapping_of(word, Speed.read)
"""The file of ``--balance FILE``: GPU types or node names, a node's own entry before its type's."""


def _shares(plan: Plan, options: JobOptions) -> tuple[int, ...] | None:
    batch = options.global_batch_size
    if batch is None or options.balance == "measured":
        return None
    if options.balance == "equal" and options.ranks == "node":
        return tuple(apportion(batch, [c.gpus_per_node for c in plan.components for _ in c.nodes]))
    if options.balance == "equal":
        return tuple(equal_shares(batch, plan.world_size))
    path = Path(options.balance)
    speeds = validate(read_speeds, load_yaml(path, PlanError), PlanError)
    costs: list[tuple[float, float]] = []
    limits: list[int] = []
    for rank in plan.ranks():
        speed = speeds.get(rank.node) or speeds.get(rank.gpu_type or "")
        if speed is None:
            raise PlanError(
                f"{path}: neither node {rank.node!r} nor its GPU type {rank.gpu_type!r} is in the file; give one"
            )
        gpus = plan.components[rank.component].gpus_per_node if options.ranks == "node" else 1
        costs.append((speed.alpha, speed.beta / gpus))
        limits.append(batch if speed.max_batch is None else speed.max_batch * gpus)
    if sum(limits) < batch:
        raise PlanError(
            f"{path}: the max_batch of all ranks add up to {sum(limits)}, less than the global batch of {batch}"
        )
    return tuple(split_batch(batch, costs, limits))
