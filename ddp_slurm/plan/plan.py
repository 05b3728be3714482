"""A plan: the nodes of a job grouped into components of one shape, a rank for each GPU, shares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_slurm.cluster.machines import GpuModel, Node, gres_text
from ddp_slurm.comm import EXACT
from ddp_slurm.errors import DdpSlurmError, counted
from ddp_slurm.hostlist import compress_hostlist, compress_tasks_per_node
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job_env import JobEnv


class PlanError(DdpSlurmError):
    """The options ask for what the cluster does not have."""


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes of one shape: one component of a heterogeneous job, one segment of its srun."""

    nodes: tuple[str, ...]
    """In the order in which Slurm hands out ranks in a component: by name, numbers as numbers."""
    gpus: tuple[GpuModel, ...]
    """Those that the job uses on each node."""
    cpus_per_task: int
    memory_mb: int | None
    """Memory on each node, MiB; None where Slurm decides."""
    memory_per_cpu_mb: int | None
    """MiB for each CPU where the job asks for it so; ``memory_mb`` is then their sum."""
    partition: str | None
    constraint: str | None
    interface: str | None
    env: tuple[tuple[str, str], ...]
    one_rank_a_node: bool
    """One rank drives all GPUs of its node."""
    shared_cpus: int | None = None
    """CPUs of a node that has fewer than ranks, which share them."""

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
    def cpus_per_node(self) -> int:
        return self.shared_cpus or self.cpus_per_task * self.tasks_per_node

    @property
    def gres(self) -> str:
        return gres_text(self.gpus)

    @property
    def nodelist(self) -> str:
        return compress_hostlist(self.nodes)

    @property
    def task_env(self) -> dict[str, str]:
        """Variables of this component's ranks.

        NCCL's leading ``=`` asks for exactly this interface, not for a prefix.
        """
        if self.interface is None:
            return dict(self.env)
        return {
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
            "GLOO_SOCKET_IFNAME": self.interface,
            **dict(self.env),
        }

    @property
    def env_without_interface(self) -> dict[str, str]:
        """``task_env`` for where the node's network interfaces do not exist."""
        return {name: value for name, value in self.env if not name.endswith("_SOCKET_IFNAME")}

    @property
    def gpu_types(self) -> list[str | None]:
        """The GPU type of each rank of a node, of its first GPU for a rank that has several."""
        types = [model.type for model in self.gpus for _ in range(model.count)]
        return types[: self.tasks_per_node]


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


def ranks_of(
    components: Sequence[Component], shares: Sequence[int] | None = None
) -> Iterator[PlannedRank]:
    """Every rank, in order."""
    rank = node_rank = 0
    for index, component in enumerate(components):
        types = component.gpu_types
        for node in component.nodes:
            for local_rank, gpu_type in enumerate(types):
                share = shares[rank] if shares else None
                yield PlannedRank(rank, index, node, node_rank, local_rank, gpu_type, share)
                rank += 1
            node_rank += 1


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
    predicted_step: float | None = None
    """Seconds of an optimizer step by the file of speeds; None without one."""
    bucket_bytes: int | None = None
    """Of the gradients' all-reduces by the file of speeds; None: DistributedDataParallel's own."""

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
    def shared_cpus_note(self) -> str:
        """The nodes whose ranks share CPUs; empty where there are none."""
        nodes = [
            f"{component.nodelist} has {counted(component.shared_cpus, 'CPU')} for "
            f"{component.tasks_per_node} ranks"
            for component in self.components
            if component.shared_cpus
        ]
        return f"{'; '.join(nodes)}, which share them" if nodes else ""

    @property
    def task_counts(self) -> tuple[int, ...]:
        """Tasks on each node, in the order of node ranks."""
        return tuple(part.tasks_per_node for part in self.components for _ in part.nodes)

    @property
    def tasks_per_node(self) -> str:
        """The same as ``1,2(x3)``."""
        return compress_tasks_per_node(self.task_counts)

    def ranks(self) -> Iterator[PlannedRank]:
        """Every rank, in order."""
        return ranks_of(self.components, self.shares)

    def job_env(self) -> JobEnv:
        """The plan as its ranks see it: each checks the world that it meets against it."""
        speeds = self.options.balance.speeds
        return JobEnv(
            world_size=self.world_size,
            tasks_per_node=self.task_counts,
            global_batch_size=self.options.global_batch_size,
            shares=self.shares,
            balance=self.options.balance.kind,
            predicted_step=self.predicted_step,
            bucket_bytes=self.bucket_bytes,
            known_limits=speeds.known_limits() if speeds else None,
            comm=None if self.options.comm == EXACT else self.options.comm,
        )
