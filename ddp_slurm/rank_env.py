"""A process's place in the training's world, from the variables that the launcher set.

Three launchers are understood: an srun step; an srun step over the components of a heterogeneous
job; and everything that sets the variables of torch's ``env://`` (torchrun, ``ddp_slurm.run``,
mpirun wrappers, Kubernetes operators, Azure ML, DeepSpeed, ...). Standard library only.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import expand_hostlist, expand_tasks_per_node
from ddp_slurm.job_env import JobEnv

ENV_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun sets for every process, besides GROUP_RANK for the node."""

NEEDED_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's ``env://`` needs, and so every launcher sets."""

MARKS_OF_A_LAUNCHER = (*ENV_VARIABLES[:4], "GROUP_RANK")
"""One of these alone means that a launcher set the variables of ``env://``. MASTER_ADDR and
MASTER_PORT do not: users choose them for a Slurm step."""

INTERACTIVE_STEPS = ("4294967290", "-6")
"""SLURM_STEP_ID in the shell that salloc starts on the first node
(LaunchParameters=use_interactive_step)."""

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Each limits the GPUs that a process sees. On AMD, ROCR limits the driver, and the other two
choose from what it leaves."""

FIRST_PORT = 10_000
PORT_COUNT = 19_000
"""Below the kernel's ephemeral ports (32768 on Linux), above the daemons' and clear of torchrun's
29500."""


class LaunchError(DdpSlurmError):
    """The processes were not started in a way that makes one world."""


@dataclass(frozen=True)
class RankEnv:
    """One process's place in the world.

    ``local_rank``, ``local_world_size``, ``node_rank`` and ``device_index`` are None where the
    launcher does not set them: torch's ``env://`` needs none of them. ``init_distributed`` derives
    them from the ranks' hosts when the ranks meet, so in ``World.env`` none is None.
    """

    rank: int
    local_rank: int | None
    world_size: int
    local_world_size: int | None
    node_rank: int | None
    master_addr: str
    master_port: int
    device_index: int | None = None
    """Index among the GPUs that this process sees: see ``choose_device``."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "RankEnv":
        """Read ``environ`` (default ``os.environ``).

        Raises LaunchError, with the variable and its value, for an incomplete set of variables,
        outside a launcher, and in a batch script that did not go through srun.
        """
        env = os.environ if environ is None else environ
        if any(name in env for name in MARKS_OF_A_LAUNCHER):
            return cls._from_env_variables(env)
        # A batch shell has SLURM_PROCID=0 too, and the shell of salloc is a step of its own.
        in_step = "SLURM_STEP_NODELIST" in env
        if in_step and env.get("SLURM_STEP_ID") not in INTERACTIVE_STEPS:
            return cls._from_slurm_step(env)
        if "SLURM_JOB_ID" in env:
            raise LaunchError(
                "not inside an srun step: this process runs in the shell of job "
                f"{env['SLURM_JOB_ID']}, so it would wait for ranks that never come. Start it "
                "with: srun python -m ddp_slurm.run python train.py "
                "(for a heterogeneous job let ddp-slurm submit write the srun line)"
            )
        raise LaunchError(
            "no launcher: neither torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, ...) nor "
            "those of an srun step are set. Start it with: "
            "python -m ddp_slurm.submit --backend local -- python train.py"
        )

    @classmethod
    def _from_env_variables(cls, env: Mapping[str, str]) -> "RankEnv":
        """From the variables of ``env://``. SLURM_* variables fill no gap: they may be another
        world's."""
        missing = [name for name in NEEDED_VARIABLES if name not in env]
        if missing:
            found = [name for name in (*MARKS_OF_A_LAUNCHER, *NEEDED_VARIABLES[2:]) if name in env]
            raise LaunchError(
                f"incomplete variables of a launcher: {', '.join(found)} set, "
                f"{', '.join(missing)} missing. Unset the former (a line such as "
                "'export WORLD_SIZE=...' in a script or ~/.bashrc?) or set all of "
                f"{', '.join(NEEDED_VARIABLES)}"
            )
        node_rank = "GROUP_RANK" if "GROUP_RANK" in env else "NODE_RANK"
        place = cls(
            rank=_int(env, "RANK"),
            local_rank=_int_if_set(env, "LOCAL_RANK"),
            world_size=_int(env, "WORLD_SIZE"),
            local_world_size=_int_if_set(env, "LOCAL_WORLD_SIZE"),
            node_rank=_int_if_set(env, node_rank),
            master_addr=env["MASTER_ADDR"],
            master_port=_port(env),
        )
        return _checked(place, env)

    @classmethod
    def _from_slurm_step(cls, env: Mapping[str, str]) -> "RankEnv":
        # Not SLURM_NTASKS_PER_NODE or SLURM_TASKS_PER_NODE: in a heterogeneous step they belong to
        # another component, or are in the order of host names. SLURM_GTIDS lists the global ranks
        # of this very node.
        master_port = port_of_job(_int(env, "SLURM_JOB_ID"))
        if "MASTER_PORT" in env:
            master_port = _port(env)
        place = cls(
            rank=_int(env, "SLURM_PROCID"),
            local_rank=_int(env, "SLURM_LOCALID"),
            world_size=_int(env, "SLURM_NTASKS"),
            local_world_size=len(_text(env, "SLURM_GTIDS").split(",")),
            node_rank=_int(env, "SLURM_NODEID"),
            master_addr=env.get("MASTER_ADDR") or hosts_in_order(env)[0],
            master_port=master_port,
        )
        return _checked(place, env)

    def env_variables(self) -> dict[str, str]:
        """The variables that ``torch.distributed`` and unmodified training scripts read.

        One whose value is not known is left out.
        """
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def known(value: int | None, variable: str) -> int:
    """``value``, where it is needed before the ranks meet.

    Raises LaunchError, with the variable to set, for None.
    """
    if value is None:
        raise LaunchError(
            f"{variable} is not set, and it is needed before the ranks meet. Let the launcher set "
            "it, or start the script with ddp-slurm submit or torchrun"
        )
    return value


def tasks_per_node(environ: Mapping[str, str]) -> Sequence[int]:
    """Ranks on each node; empty where neither the job nor Slurm sets them.

    Slurm's are in the order of host names, so only the numbers count, not their order.
    """
    planned = JobEnv.from_environ(environ).tasks_per_node
    if planned is not None:
        return planned
    of_step = environ.get("SLURM_STEP_TASKS_PER_NODE")
    return expand_tasks_per_node(of_step) if of_step else []


def port_of_job(job_id: int) -> int:
    """The rendezvous port of a Slurm job: the same on every node and in every component."""
    return FIRST_PORT + job_id % PORT_COUNT


def count_visible_devices(environ: Mapping[str, str]) -> int | None:
    """How many GPUs the VISIBLE_DEVICES variables leave; None where none of them is set.

    An empty variable counts as not set.
    """
    lists = [environ[name] for name in VISIBLE_DEVICES if environ.get(name)]
    return min((len(devices.split(",")) for devices in lists), default=None)


def choose_device(local_rank: int, local_world_size: int, visible: int | None) -> int:
    """Index of the rank's GPU among those that it sees.

    The local rank where each process sees all GPUs of the node; 0 where the launcher gave each
    process its own (srun --gpus-per-task).
    """
    if visible is not None and visible < local_world_size:
        return 0
    return local_rank


def _checked(place: RankEnv, env: Mapping[str, str]) -> RankEnv:
    """With its ``device_index``. Raises LaunchError for values that contradict each other."""
    rank, world_size, local_rank = place.rank, place.world_size, place.local_rank
    local_world_size, node_rank = place.local_world_size, place.node_rank
    most_on_node = world_size if local_world_size is None else local_world_size
    fits = (
        rank < world_size
        and (local_rank is None or local_rank < most_on_node)
        and most_on_node <= world_size
        and (node_rank is None or node_rank <= rank)
    )
    if not fits:
        raise LaunchError(
            f"the launcher's variables contradict each other: rank {rank} of {world_size}, "
            f"local rank {local_rank} of {local_world_size}, node rank {node_rank}"
        )
    if not place.master_addr:
        raise LaunchError("MASTER_ADDR is empty; it must be the address of rank 0's host")
    if local_rank is None or local_world_size is None:
        return place
    visible = count_visible_devices(env)
    return replace(place, device_index=choose_device(local_rank, local_world_size, visible))


def hosts_in_order(env: Mapping[str, str]) -> list[str]:
    """The hosts of an srun step in the order of node ranks.

    Slurm's list for a heterogeneous step is sorted by name; only the lists of the components show
    where rank 0 runs.
    """
    step_hosts = dict.fromkeys(expand_hostlist(env["SLURM_STEP_NODELIST"]))
    hosts: list[str] = []
    size = "SLURM_HET_SIZE" if "SLURM_HET_SIZE" in env else "SLURM_PACK_SIZE"  # before 20.02
    components = _int_if_set(env, size) or 0
    for group in range(components):
        old_name = f"SLURM_JOB_NODELIST_PACK_GROUP_{group}"
        of_group = env.get(old_name) or _text(env, f"SLURM_JOB_NODELIST_HET_GROUP_{group}")
        # A step may leave components out.
        hosts += [host for host in expand_hostlist(of_group) if host in step_hosts]
    return hosts or list(step_hosts)


def _text(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise LaunchError(
            f"{name} is not set, though this is an srun step; was the environment changed?"
        )
    return env[name]


def _int(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    # int() would take blanks, signs and other alphabets' digits too
    if not re.fullmatch("[0-9]{1,10}", text):
        raise LaunchError(f"{name}={text!r} is not a whole number >= 0")
    return int(text)


def _int_if_set(env: Mapping[str, str], name: str) -> int | None:
    return _int(env, name) if name in env else None


def _port(env: Mapping[str, str]) -> int:
    port = _int(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is not a port; expected 1 to 65535")
    return port
