"""``ddp-slurm verify -- CMD``: a script's gradient on uneven ranks beside that of one process."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_slurm.backends.local import HOST, free_port
from ddp_slurm.backends.processes import Process, run_all
from ddp_slurm.cluster.this_machine import visible_gpus
from ddp_slurm.console import Commands, add_command, say
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.hostlist import HostlistError, expand_tasks_per_node
from ddp_slurm.job_env import JobEnv, Verify
from ddp_slurm.launchers import RUN, SCRIPTS
from ddp_slurm.slurm_client.commands import clean_environ


class VerifyError(DdpSlurmError):
    """What cannot be compared."""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "verify", verify)
    parser.usage = "%(prog)s [OPTIONS] -- COMMAND ..."
    parser.add_argument(
        "--shares",
        default="1,2,4",
        metavar="LIST",
        help="proportions of the ranks' shares [default: %(default)s]",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="optimizer steps to compare [default: %(default)s]",
    )
    parser.add_argument("command", nargs="...", metavar="COMMAND", help="the script, after --")


def verify(*, shares: str, steps: int, command: list[str]) -> None:
    """Compare a script's gradient on uneven ranks of this machine with that of one process.

    Runs the first optimizer steps twice: one process takes the whole batch, then ranks their
    shares of it. Prints the largest relative difference by module, and the likely cause. Exit
    status 1 where the gradients differ.
    """
    words = command[1:] if command[:1] == ["--"] else command
    counts = _shares(shares)
    if not words or steps < 1:
        raise VerifyError("expected --steps of 1 or more, and a command: verify -- python train.py")
    with tempfile.TemporaryDirectory(prefix="ddp-slurm-verify-") as folder:
        files = [str(Path(folder, name)) for name in ("whole", "ranks")]
        for file, parts in zip(files, ((sum(counts),), counts), strict=True):
            _run(words, parts, Verify(steps, len(counts), file))
            if not Path(file).exists():
                raise VerifyError(f"the script ended before optimizer step {steps}; see --steps")
        compare = [sys.executable, "-m", f"{SCRIPTS}.compare", *files]
        raise SystemExit(subprocess.run(compare).returncode)


def _shares(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(expand_tasks_per_node(text))
    except HostlistError as error:
        raise VerifyError(f"--shares {text!r}: {error}") from None
    if len(counts) < 2:
        raise VerifyError(f"--shares {text!r}: expected two ranks or more, such as 1,2,4")
    return counts


def _devices(ranks: int) -> list[str]:
    """GPUs of this machine, one for each rank; none, for the CPU, where it has fewer."""
    devices = visible_gpus()
    if 0 < len(devices) < ranks:
        say(
            f"verify: this machine has {len(devices)} GPUs for {ranks} ranks, so both runs are on "
            "the CPU; give fewer --shares to run them on GPUs"
        )
    return list(devices[:ranks]) if len(devices) >= ranks else []


def _run(words: Sequence[str], shares: tuple[int, ...], verify: Verify) -> None:
    say(f"verify: {verify.steps} steps on {len(shares)} of {verify.ranks} ranks")
    processes = [
        Process(
            argv=[sys.executable, "-m", RUN, "--uneven", *words],
            environ=environ,
            label=f"[{rank}] ",
            name=f"rank {rank}",
        )
        for rank, environ in enumerate(_environs(shares, verify, _devices(verify.ranks)))
    ]
    status = run_all(processes, "rank").status
    if status:
        raise SystemExit(status)


def _environs(
    shares: tuple[int, ...], verify: Verify, devices: list[str]
) -> Iterator[dict[str, str]]:
    """Of each rank. They are on two nodes, uneven as Lightning's plug-in expects them."""
    port = free_port()
    world_size = len(shares)
    tasks = (1, world_size - 1) if world_size > 1 else (1,)
    job_env = JobEnv(shares=shares, tasks_per_node=tasks, verify=verify)
    common = {"OMP_NUM_THREADS": "1", **clean_environ(os.environ), **job_env.to_environ()}
    for rank in range(world_size):
        node = min(rank, 1)
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank - node,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": tasks[node],
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": ",".join(devices[node:world_size] if node else devices[:1]),
        }
        yield {**common, **{name: str(value) for name, value in place.items()}}
