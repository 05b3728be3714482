"""The embedded default: every planned rank as a process of this machine, through the environment of a Slurm step.

Where the machine has no GPU the ranks compute on the CPU (gloo), so any plan can be tried anywhere.
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate

from ddp_slurm.backends.processes import Process, run_all
from ddp_slurm.cluster.this_machine import visible_gpus
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.plan import Plan
from ddp_slurm.slurm_client.commands import clean_environ

HOST = "127.0.0.1"


class LocalError(DdpSlurmError):
    """This machine cannot run the plan."""


def step_processes(plan: Plan, environ: Mapping[str, str]) -> Iterator[Process]:
    """Every rank with the variables that an srun step over the plan's components would set.

    Raises LocalError where the machine has GPUs, but fewer than the plan.
    """
    options = plan.options
    for option, value in (
        ("container", options.container),
        ("launcher", options.launcher == "torchrun"),
        ("setup", options.setup),
        ("conda-env", options.conda_env),
    ):
        if value:
            raise LocalError(
                f"--{option} does not go with --backend local, which starts the ranks itself, in the environment of "
                "this shell or of --venv"
            )
    devices = visible_gpus()
    on_nodes = [component.gpus_per_node for component in plan.components for _ in component.nodes]
    first_gpus = [0, *accumulate(on_nodes)]
    if devices and len(devices) < first_gpus[-1]:
        raise LocalError(
            f"the plan has {first_gpus[-1]} GPUs, this machine has {len(devices)}; use --gpus {len(devices)}, "
            "or CUDA_VISIBLE_DEVICES= (empty) to try the whole plan on the CPU"
        )
    ranks = list(plan.ranks())
    on_node: dict[int, list[int]] = {}
    for rank in ranks:
        on_node.setdefault(rank.node_rank, []).append(rank.rank)
    outer = clean_environ(environ)
    base = {
        "OMP_NUM_THREADS": "1",  # as torchrun does: with every core's threads in each, the ranks would only wait
        "PYTHONUNBUFFERED": "1",
        **outer,
        **_venv_environ(options.venv, outer.get("PATH", os.defpath)),
        **plan.job_env().to_environ(),
        **_slurm_step(plan),
        **options.env,
    }
    argv = task_command(plan)
    width = len(str(plan.world_size - 1))
    for rank in ranks:
        neighbours = on_node[rank.node_rank]
        visible = devices[first_gpus[rank.node_rank] : first_gpus[rank.node_rank + 1]]
        yield Process(
            argv=argv,
            name=f"rank {rank.rank} on {rank.node}",
            label=f"[{rank.rank:{width}} {rank.node}] ",
            environ={
                **base,
                **{
                    k: v
                    for k, v in plan.components[rank.component].task_env.items()
                    if not k.endswith("_SOCKET_IFNAME")
                },
                "SLURM_PROCID": str(rank.rank),
                "SLURM_LOCALID": str(rank.local_rank),
                "SLURM_NODEID": str(rank.node_rank),
                "SLURMD_NODENAME": rank.node,
                "SLURM_GTIDS": ",".join(map(str, neighbours)),
                **({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if devices else {}),
            },
        )


def _venv_environ(venv: str | None, path: str) -> dict[str, str]:
    if venv is None:
        return {}
    if not os.path.exists(f"{venv}/bin/python"):
        raise LocalError(
            f"--venv: {venv!r} has no bin/python; give the folder of a virtual environment"
        )
    return {"VIRTUAL_ENV": venv, "PATH": f"{venv}/bin{os.pathsep}{path}"}


def _slurm_step(plan: Plan) -> dict[str, str]:
    env = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(plan.world_size),
        "SLURM_STEP_NUM_TASKS": str(plan.world_size),
        "SLURM_STEP_NODELIST": ",".join(sorted(c.nodelist for c in plan.components)),
        "SLURM_JOB_NODELIST": ",".join(sorted(c.nodelist for c in plan.components)),
        "MASTER_ADDR": HOST,  # the planned hosts' names mean nothing here
        "MASTER_PORT": str(_free_port()),
    }
    if len(plan.components) > 1:
        env["SLURM_HET_SIZE"] = str(len(plan.components))
        env |= {
            f"SLURM_JOB_NODELIST_HET_GROUP_{i}": c.nodelist for i, c in enumerate(plan.components)
        }
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def task_command(plan: Plan) -> list[str]:
    """The command, with this very interpreter for a bare ``python``: the one that has the packages, or --venv's."""
    first, *rest = plan.options.task_command
    bare = first in ("python", "python3") and not (plan.options.python or plan.options.venv)
    return [sys.executable if bare else first, *rest]


def describe(plan: Plan) -> str:
    """The command of each rank with its variables, for ``--dry-run``."""
    lines = []
    for process in step_processes(plan, {}):
        variables = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in sorted(process.environ.items())
        )
        lines.append(f"{process.label}{variables} {shlex.join(process.argv)}\n")
    return "".join(lines)


def run(plan: Plan) -> int:
    """Run all ranks to the end. Returns 0, or the exit status of the first rank that failed (128 + its signal).

    When one fails, and on Ctrl-C or SIGTERM (130, 143), the others are stopped; nothing is left running.
    """
    return run_all(list(step_processes(plan, os.environ)), "rank").status
