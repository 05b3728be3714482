"""The default without Slurm: every planned rank as a process of this machine.

Each rank gets the environment of a Slurm step. On a machine without GPUs the ranks compute on the
CPU (gloo), so any plan can be tried anywhere.
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice

from ddp_slurm import job_env
from ddp_slurm.backends.processes import Process, run_all
from ddp_slurm.cluster.this_machine import visible_gpus
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.options import PYTHONS, JobOptions
from ddp_slurm.plan import Plan, PlannedRank
from ddp_slurm.slurm_client.commands import clean_environ

HOST = "127.0.0.1"


class LocalError(DdpSlurmError):
    """This machine cannot run the plan."""


def step_processes(plan: Plan, environ: Mapping[str, str]) -> Iterator[Process]:
    """Every rank, with the variables that an srun step over the plan's components would set.

    Raises LocalError for options of other backends, and where the machine has GPUs, but fewer than
    the plan.
    """
    _check_options(plan.options)
    devices = _devices_of_nodes(plan)
    shared = _shared_environ(plan, environ)
    argv = task_command(plan)
    width = len(str(plan.world_size - 1))
    for node_rank, ranks in groupby(plan.ranks(), key=lambda rank: rank.node_rank):
        on_node = list(ranks)
        component = plan.components[on_node[0].component]
        own_devices = devices[node_rank] if devices else None
        for rank in on_node:
            yield Process(
                argv=argv,
                name=f"rank {rank.rank} on {rank.node}",
                label=f"[{rank.rank:{width}} {rank.node}] ",
                environ={
                    **shared,
                    **component.env_without_interface,
                    "SLURM_JOB_NUM_NODES": str(len(component.nodes)),
                    **_rank_environ(rank, on_node, own_devices),
                },
            )


def _check_options(options: JobOptions) -> None:
    others = {
        "container": options.container is not None,
        "launcher": options.launcher != "srun",
        "setup": bool(options.setup),
        "conda-env": options.conda_env is not None,
    }
    for option, is_given in others.items():
        if is_given:
            raise LocalError(
                f"--{option} cannot be combined with --backend local, which starts the ranks in "
                "the environment of this shell, or of --venv"
            )


def _devices_of_nodes(plan: Plan) -> list[Sequence[str]] | None:
    """The GPUs of this machine, dealt out to the plan's nodes in order; None if it has none."""
    devices = visible_gpus()
    if not devices:
        return None
    counts = [component.gpus_per_node for component in plan.components for _ in component.nodes]
    if len(devices) < sum(counts):
        raise LocalError(
            f"the plan has {sum(counts)} GPUs, this machine has {len(devices)}; "
            f"use --gpus {len(devices)}, or CUDA_VISIBLE_DEVICES= (empty) to try the whole plan "
            "on the CPU"
        )
    left = iter(devices)
    return [list(islice(left, count)) for count in counts]


def _shared_environ(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all ranks have in common; later ones win."""
    outer = clean_environ(environ)
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun sets it: with all cores each, ranks only wait
        "PYTHONUNBUFFERED": "1",
        **outer,
        **_venv_environ(plan.options.venv, outer.get("PATH", os.defpath)),
        **plan.job_env().to_environ(),
        **_step_environ(plan),
        **plan.options.env,
    }


def _venv_environ(venv: str | None, path: str) -> dict[str, str]:
    if venv is None:
        return {}
    if not os.path.exists(f"{venv}/bin/python"):
        raise LocalError(
            f"--venv: {venv!r} has no bin/python; give the folder of a virtual environment"
        )
    return {"VIRTUAL_ENV": venv, "PATH": f"{venv}/bin{os.pathsep}{path}"}


def _step_environ(plan: Plan) -> dict[str, str]:
    """What Slurm would set for the whole step."""
    nodelists = [component.nodelist for component in plan.components]
    hosts = ",".join(sorted(nodelists))
    environ = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(plan.world_size),
        "SLURM_STEP_NUM_TASKS": str(plan.world_size),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_JOB_NODELIST": hosts,
        "MASTER_ADDR": HOST,  # the names of the planned hosts do not resolve here
        "MASTER_PORT": str(free_port()),
    }
    if len(nodelists) > 1:
        environ["SLURM_HET_SIZE"] = str(len(nodelists))
        for index, nodelist in enumerate(nodelists):
            environ[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"] = nodelist
    return environ


def free_port() -> int:
    """A port of this machine that no process uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _rank_environ(
    rank: PlannedRank, on_node: Sequence[PlannedRank], devices: Sequence[str] | None
) -> dict[str, str]:
    environ = {
        "SLURM_PROCID": str(rank.rank),
        "SLURM_LOCALID": str(rank.local_rank),
        "SLURM_NODEID": str(rank.node_rank),
        "SLURMD_NODENAME": rank.node,
        "SLURM_GTIDS": ",".join(str(neighbour.rank) for neighbour in on_node),
    }
    if devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return environ


def task_command(plan: Plan) -> list[str]:
    """The command, with this interpreter for ``python``: it has the packages; or with --venv's."""
    first, *rest = plan.options.task_command
    is_python = first in PYTHONS
    has_own_python = plan.options.python or plan.options.venv
    return [sys.executable if is_python and not has_own_python else first, *rest]


def describe(plan: Plan) -> str:
    """The command of each rank with its variables, for ``--dry-run``."""
    lines = []
    for process in step_processes(plan, {}):
        in_order = sorted(process.environ.items())
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in in_order)
        lines.append(f"{process.label}{variables} {shlex.join(process.argv)}\n")
    return "".join(lines)


def run(plan: Plan) -> int:
    """Run all ranks to the end. Returns 0, or the status of the first that failed (128 + signal).

    When one fails, and on a signal that ends this process, the others are stopped; nothing is left
    running.
    """
    environ = {**os.environ, job_env.TOKEN: job_env.new_token()}
    return run_all(list(step_processes(plan, environ)), "rank").status
