"""Lightning on nodes with different numbers of GPUs.

Lightning computes the world as ``devices * num_nodes``, which no value makes right for 4 + 2 + 1
GPUs: its check refuses to start, and its sampler would deal out the data for 12, 6 or 3 ranks.
Where the launcher started an uneven world, its DDP and FSDP strategies therefore take the world
from the launcher. In an even world nothing is changed.

Unmodified scripts get that through Lightning's own entry points (``callbacks_factory``) once
ddp_slurm is installed; ``Trainer(plugins=[DdpSlurmEnvironment()])`` states it in the script, and
needs no ``python -m ddp_slurm.run``.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from ddp_slurm.balance import planned_shares
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import ADAPTIVE, MEASURED, JobEnv
from ddp_slurm.rank_env import LaunchError, RankEnv, known, tasks_per_node

try:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

    PACKAGES: tuple[str, ...] = ("lightning.pytorch", "lightning.fabric")
except ImportError:
    from lightning_fabric.plugins.environments import cluster_environment

    ClusterEnvironment = cluster_environment.ClusterEnvironment  # type: ignore[misc,assignment]
    PACKAGES = ("pytorch_lightning",)

__all__ = ["DdpSlurmEnvironment"]


def is_uneven(environ: Mapping[str, str]) -> bool:
    """Whether the nodes run different numbers of ranks."""
    return len(set(tasks_per_node(environ))) > 1


class DdpSlurmEnvironment(ClusterEnvironment):
    """The world that srun, torchrun or ``ddp_slurm.run`` started, for ``Trainer(plugins=[...])``
    and Fabric.

    ``devices`` and ``num_nodes`` may have any value that Lightning takes on the node:
    ``devices="auto", num_nodes=3``. Raises LaunchError outside a launcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self._env = RankEnv.from_environ()
        if is_uneven(os.environ):
            for package in PACKAGES:
                _adapt(package)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._env.master_addr

    @property
    def main_port(self) -> int:
        return self._env.master_port

    @staticmethod
    def detect() -> bool:
        try:
            RankEnv.from_environ()
        except LaunchError:
            return False
        return True

    def world_size(self) -> int:
        return self._env.world_size

    def set_world_size(self, size: int) -> None:
        """Ignores Lightning's product of devices and nodes; the launcher's number counts."""

    def global_rank(self) -> int:
        return self._env.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignores Lightning's guess, which assumes equal nodes; the launcher's number counts."""

    def local_rank(self) -> int:
        return known(self._env.local_rank, "LOCAL_RANK")

    def node_rank(self) -> int:
        return known(self._env.node_rank, "NODE_RANK")

    @property
    def node_count(self) -> int:
        """For ``num_nodes``; 1 where the launcher does not set it."""
        return len(tasks_per_node(os.environ)) or 1

    def planned_shares(self, global_batch: int) -> list[int]:
        """Samples of a global batch for each rank, as the job was planned, else equal shares.

        Raises LaunchError where the job asks for measured shares: Lightning needs its sampler
        before the ranks have met, so nothing can be measured.
        """
        balance = JobEnv.from_environ().balance
        if self._env.world_size > 1 and balance in (MEASURED, ADAPTIVE):
            raise LaunchError(
                f"the job asks for measured shares (--balance {balance}), and a Lightning script "
                "needs its shares before the ranks meet and can be measured: submit with "
                "--balance equal or a file of speeds (--balance speeds.yaml)"
            )
        return planned_shares(global_batch, self._env.world_size)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        ranks = num_devices * num_nodes
        if is_uneven(os.environ) or ranks == self._env.world_size:
            return
        here = self._env.local_world_size
        on_node = "" if here is None else f", {here} on this node"
        raise LaunchError(
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}) makes {ranks} ranks, the "
            f"launcher started {self._env.world_size}{on_node}"
        )


def lightning_callbacks() -> list[Any]:
    """Entry point of ``lightning.pytorch``, called by each Trainer."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """Entry point of ``pytorch_lightning``, called by each Trainer."""
    return _callbacks("pytorch_lightning")


def fabric_callbacks() -> list[Any]:
    """Entry point of ``lightning.fabric``, called by each Fabric."""
    if not _is_launched():
        return []
    _adapt("lightning.fabric")
    return [FabricWorldCheck()]


class FabricWorldCheck:
    """A Fabric without ``strategy="ddp"`` would silently train alone on every rank."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        _check_world(fabric.world_size, "Fabric", 'Fabric(strategy="ddp", devices="auto")')


def _check_world(found: int, what: str, remedy: str) -> None:
    world_size = RankEnv.from_environ().world_size
    if found != world_size:
        raise DdpSlurmError(
            f"the {what} has {found} ranks, the launcher started {world_size}; use {remedy}"
        )


def _is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and is_uneven(os.environ)


def _callbacks(package: str) -> list[Any]:
    callbacks = []
    if _is_launched():
        _adapt(package)
        callbacks.append(_world_check(package))
    if (JobEnv.from_environ().world_size or 1) > 1:
        callbacks.append(_exchange(package))
    return callbacks


def _exchange(package: str) -> Any:
    """What ``World.wrap`` does in other scripts."""
    base = importlib.import_module(f"{package}.callbacks").Callback

    class Exchange(base):  # type: ignore[misc, valid-type]
        """Lets the model's DDP exchange gradients as the job asks (``--comm``)."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            from torch.nn.parallel import DistributedDataParallel

            from ddp_slurm.training.links.wrap import attach_by_environment

            if isinstance(trainer.strategy.model, DistributedDataParallel):
                attach_by_environment(trainer.strategy.model, trainer.strategy.root_device)

    return Exchange()


def _world_check(package: str) -> Any:
    base = importlib.import_module(f"{package}.callbacks").Callback

    class WorldCheck(base):  # type: ignore[misc, valid-type]
        """A Trainer without ``strategy="ddp"`` would silently train alone on every rank."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            remedy = 'Trainer(strategy="ddp", devices="auto", num_nodes=...)'
            _check_world(trainer.world_size, "Trainer", remedy)

    return WorldCheck()


def _adapt(package: str) -> None:
    """Replace what computes with equal nodes in the strategies and in the check of torchrun's
    environment."""
    strategies = importlib.import_module(f"{package}.strategies")
    for strategy in (strategies.DDPStrategy, strategies.FSDPStrategy):
        strategy.distributed_sampler_kwargs = property(_sampler_kwargs)
        strategy.root_device = property(_root_device)
    fabric = "lightning.fabric" if package.startswith("lightning.") else "lightning_fabric"
    environments = importlib.import_module(f"{fabric}.plugins.environments")
    environments.TorchElasticEnvironment.validate_settings = _accept_settings


def _sampler_kwargs(strategy: Any) -> dict[str, int]:
    return {"num_replicas": strategy.world_size, "rank": strategy.global_rank}


def _root_device(strategy: Any) -> torch.device:
    devices = strategy.parallel_devices
    if devices[0].type == "cpu":
        return torch.device("cpu")
    env = RankEnv.from_environ()
    known(env.local_rank, "LOCAL_RANK")
    index = known(env.device_index, "LOCAL_WORLD_SIZE")
    if index >= len(devices):
        raise LaunchError(
            f"local rank {strategy.local_rank} has no device: the Trainer has {len(devices)} on "
            'this node; use devices="auto"'
        )
    return torch.device(devices[index])


def _accept_settings(environment: Any, num_devices: int, num_nodes: int) -> None:
    """Any product is wrong here; the launcher's world is taken instead."""
