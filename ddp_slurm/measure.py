"""``ddp-slurm measure``: a short job over all GPU types that writes a file of speeds."""

import os
from pathlib import Path
from typing import Any

from ddp_slurm import console
from ddp_slurm.errors import DdpSlurmError, counted
from ddp_slurm.job.balance_option import Balance
from ddp_slurm.job.speeds import Speeds, read_speeds
from ddp_slurm.job_env import MEASURED, JobEnv
from ddp_slurm.plan import Plan
from ddp_slurm.plan.commands import add_job_options, request_of
from ddp_slurm.plan.request import Reading, read_request
from ddp_slurm.submit import choose_backend, start

BACKENDS = ("auto", "sbatch", "torchrun", "local")
BUILT_IN = ("python", "-m", "ddp_slurm.examples.measure")
MOST_NODES = 16
"""A larger cluster is measured on its first NODES_OF_A_SHAPE nodes of each shape."""
NODES_OF_A_SHAPE = 2
MINUTES = "10"
"""The job's time limit where none is given."""


class MeasureError(DdpSlurmError):
    """A measurement that cannot be made, or whose result was not found."""


def add_commands(commands: console.Commands) -> None:
    parser = console.add_command(commands, "measure", measure)
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="auto: sbatch where it is on PATH, else the ranks run on this machine; "
        "torchrun: on the nodes of cluster.yaml over ssh, without Slurm",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=Path("speeds.yaml"),
        metavar="FILE",
        help="where to write the speeds [default: speeds.yaml]",
    )
    add_job_options(parser)


def measure(*, backend: str, file: Path, **typed: Any) -> None:
    """Measure the GPUs and the network with a short job, and write a file of speeds.

    COMMAND is a training that uses the Trainer or world.shares: its model is measured, and it ends
    before its first step. Without a command a built-in ResNet is measured. For --balance FILE,
    --nodes auto and plan.
    """
    _check_file(file)
    chosen = choose_backend(backend)
    request = request_of(chosen, **typed)
    reading = read_request(request)
    plan = _plan_of(reading, Path(os.path.abspath(file)))
    before = _stamp(file)
    status = start(plan, request, follow=True)
    if status:
        raise SystemExit(status)
    if _stamp(file) == before and chosen == "torchrun":
        _fetch(plan, file)
    if _stamp(file) == before:
        raise MeasureError(
            f"{file} was not written: the command chose no shares (it must use the Trainer or "
            "world.shares; without a command a built-in model is measured), or the node "
            f"{plan.machines[0].name}, on which it was written, has another disk"
        )
    _report(file, read_speeds(file))


def _check_file(file: Path) -> None:
    """Raises MeasureError for a file that was not measured."""
    if not file.parent.is_dir():
        raise MeasureError(f"--file {file}: the folder {file.parent} does not exist")
    if not file.exists():
        return
    with file.open(errors="replace") as lines:
        first = lines.readline()
    if "Made by ddp-slurm measure" not in first:
        raise MeasureError(
            f"--file {file}: already exists and was not made by ddp-slurm measure; remove it, or "
            "name another file"
        )


def _plan_of(reading: Reading, file: Path) -> Plan:
    """Raises DdpSlurmError with all errors of the request."""
    options = reading.options
    if options.ranks == "node":
        reading.errors.append("--ranks node cannot be combined with measure: it measures each GPU")
    reading.options = options.replaced(
        command=options.command or BUILT_IN,
        balance=Balance(MEASURED),
        nodes=None if options.picks_nodes else options.nodes,
        name=options.name or "measure",
        time=options.time or MINUTES,
        max_restarts=0,
    )
    plan = reading.plan()
    if plan.options.nodes is None and plan.node_count > MOST_NODES:
        names = [name for part in plan.components for name in part.nodes[:NODES_OF_A_SHAPE]]
        reading.options = plan.options.replaced(nodes=tuple(names), gpus=None)
        plan = reading.plan()
    places = tuple((rank.node, rank.gpu_type or "") for rank in plan.ranks())
    for_ranks = JobEnv(measure_file=str(file), measured_ranks=places)
    env = {**plan.options.env, **for_ranks.to_environ()}
    reading.options = plan.options.replaced(env=env)
    return reading.plan()


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes with every writing of the file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _fetch(plan: Plan, file: Path) -> None:
    """Copy what rank 0 wrote on its machine, where that has a disk of its own."""
    from ddp_slurm.files import write_whole
    from ddp_slurm.ssh.command import is_local
    from ddp_slurm.ssh.run import run

    first = plan.machines[0]
    if not is_local(first):
        answer = run(first, ["cat", os.path.abspath(file)])
        if answer.status == 0:
            write_whole(file, answer.out)


def _report(file: Path, speeds: Speeds) -> None:
    links = len(speeds.measured.links) if speeds.measured else 0
    console.say(
        f"{file}: {', '.join(speeds.entries)}; {counted(links, 'link')}. "
        f"See: ddp-slurm plan --global-batch-size N --balance {file}"
    )
