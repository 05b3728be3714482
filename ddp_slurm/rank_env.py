"""Who am I in the training's world: rank, local rank and master, from what the launcher left in the environment.

Three launchers are understood: torchrun, ``ddp_slurm.run`` and anything else that sets the whole env:// set; an
srun step; an srun step over the components of a heterogeneous job. Standard library only.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import expand_hostlist

ENV_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets for every process, besides GROUP_RANK for the node."""

INTERACTIVE_STEPS = ("4294967290", "-6")
"""SLURM_STEP_ID in the shell that salloc starts on the first node (LaunchParameters=use_interactive_step)."""

# Below the kernel's ephemeral ports (32768 on Linux), above the daemons' and clear of torchrun's 29500.
FIRST_PORT, PORT_COUNT = 10_000, 19_000


class LaunchError(DdpSlurmError):
    """The processes were not started in a way that makes one world."""


@dataclass(frozen=True)
class RankEnv:
    """One process's place in the world.

    ``device_index`` is the index among the GPUs that this process can see (``CUDA_VISIBLE_DEVICES``): the local
    rank where all GPUs of the node are visible, 0 where the launcher gave the process one of its own.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    device_index: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "RankEnv":
        """Read ``environ`` (default ``os.environ``).

        Raises LaunchError, with the variable and its value, for a half-set env:// set, outside a launcher, and in a
        batch script that did not go through srun.
        """
        env = os.environ if environ is None else environ
        # MASTER_ADDR and MASTER_PORT alone are a user's choice for a Slurm step, not a sign of torchrun.
        if any(name in env for name in (*ENV_VARIABLES[:4], "GROUP_RANK")):
            return cls._from_env_variables(env)
        # A batch shell has SLURM_PROCID=0 too, and the shell of salloc is a step of its own.
        if "SLURM_STEP_NODELIST" in env and env.get("SLURM_STEP_ID") not in INTERACTIVE_STEPS:
            return cls._from_slurm_step(env)
        if "SLURM_JOB_ID" in env:
            raise LaunchError(
                "not inside an srun step: this process runs in the shell of job "
                f"{env['SLURM_JOB_ID']}, so it would wait for ranks that never come. Start it with: "
                "srun python -m ddp_slurm.run python train.py "
                "(for a heterogeneous job let ddp-slurm submit write the srun line)"
            )
        raise LaunchError(
            "no launcher: neither torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, ...) nor those of an srun step "
            "are set. Start it with: python -m ddp_slurm.submit --backend local -- python train.py"
        )

    @classmethod
    def _from_env_variables(cls, env: Mapping[str, str]) -> "RankEnv":
        node_rank = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
        missing = [name for name in (*ENV_VARIABLES, node_rank) if name not in env]
        if missing:
            found = [name for name in (*ENV_VARIABLES, node_rank) if name in env]
            raise LaunchError(
                f"half a set of torchrun's variables: {', '.join(found)} set, {', '.join(missing)} missing. "
                "Unset the former (a line such as 'export WORLD_SIZE=...' in a script or ~/.bashrc?) or set all"
            )
        return cls._checked(
            env,
            rank=_int(env, "RANK"),
            local_rank=_int(env, "LOCAL_RANK"),
            world_size=_int(env, "WORLD_SIZE"),
            local_world_size=_int(env, "LOCAL_WORLD_SIZE"),
            node_rank=_int(env, node_rank),
            master_addr=env["MASTER_ADDR"],
            master_port=_port(env),
        )

    @classmethod
    def _from_slurm_step(cls, env: Mapping[str, str]) -> "RankEnv":
        # Not SLURM_NTASKS_PER_NODE or SLURM_TASKS_PER_NODE: in a heterogeneous step they belong to another
        # component, or stand in the order of host names. SLURM_GTIDS lists the global ranks of this very node.
        return cls._checked(
            env,
            rank=_int(env, "SLURM_PROCID"),
            local_rank=_int(env, "SLURM_LOCALID"),
            world_size=_int(env, "SLURM_NTASKS"),
            local_world_size=len(_text(env, "SLURM_GTIDS").split(",")),
            node_rank=_int(env, "SLURM_NODEID"),
            master_addr=env.get("MASTER_ADDR") or _host_of_rank_0(env),
            master_port=_port(env)
            if "MASTER_PORT" in env
            else port_of_job(_int(env, "SLURM_JOB_ID")),
        )

    @classmethod
    def _checked(
        cls,
        env: Mapping[str, str],
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        node_rank: int,
        master_addr: str,
        master_port: int,
    ) -> "RankEnv":
        if not (
            rank < world_size and local_rank < local_world_size <= world_size and node_rank <= rank
        ):
            raise LaunchError(
                f"the launcher's variables contradict each other: rank {rank} of {world_size}, local rank {local_rank} "
                f"of {local_world_size}, node rank {node_rank}"
            )
        if not master_addr:
            raise LaunchError("MASTER_ADDR is empty; it must be the address of rank 0's host")
        return cls(
            rank,
            local_rank,
            world_size,
            local_world_size,
            node_rank,
            master_addr,
            master_port,
            _device_index(env, local_rank, local_world_size),
        )

    def env_variables(self) -> dict[str, str]:
        """The env:// set that ``torch.distributed`` and unmodified training scripts read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def port_of_job(job_id: int) -> int:
    """The rendezvous port of a Slurm job: the same on every node and in every component."""
    return FIRST_PORT + job_id % PORT_COUNT


def _host_of_rank_0(env: Mapping[str, str]) -> str:
    """Host names of a heterogeneous step come sorted; only the per-component lists say where rank 0 runs."""
    step_hosts = expand_hostlist(env["SLURM_STEP_NODELIST"])
    for group in range(_int(env, "SLURM_HET_SIZE") if "SLURM_HET_SIZE" in env else 0):
        old_name = f"SLURM_JOB_NODELIST_PACK_GROUP_{group}"
        hosts = env.get(old_name) or _text(env, f"SLURM_JOB_NODELIST_HET_GROUP_{group}")
        for host in expand_hostlist(hosts):
            if host in step_hosts:  # a step may leave the first components out
                return host
    return step_hosts[0]


def _device_index(env: Mapping[str, str], local_rank: int, local_world_size: int) -> int:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible and len(visible.split(",")) < local_world_size:
        return 0  # --gpus-per-task: each process sees its own devices only
    return local_rank


def _text(env: Mapping[str, str], name: str) -> str:
    try:
        return env[name]
    except KeyError:
        raise LaunchError(
            f"{name} is not set, though this is an srun step; was the environment changed?"
        ) from None


def _int(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not re.fullmatch(
        "[0-9]{1,10}", text
    ):  # int() would take blanks, signs and other alphabets' digits too
        raise LaunchError(f"{name}={text!r} is not a whole number >= 0")
    return int(text)


def _port(env: Mapping[str, str]) -> int:
    port = _int(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is not a port; 1 to 65535 are")
    return port
