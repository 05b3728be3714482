"""``python -m ddp_slurm.data.node URL [--cache FOLDER] -- CMD``: a rank whose node has the data.

Every rank of a job with ``--dataset`` begins here. The first one of a node fetches the data set,
the others wait for it; then each becomes CMD, with DDP_SLURM_DATA in its environment.
"""

import asyncio
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import DATA, DATA_TOKEN, JobEnv
from ddp_slurm.launchers import become, script_command
from ddp_slurm.rank_env import RankEnv

if TYPE_CHECKING:
    from ddp_slurm.data.swarm import Member

USAGE = "usage: python -m ddp_slurm.data.node URL [--cache FOLDER] -- CMD ..."


def fetch(url: str, folder: str | None) -> Path:
    """The data set's folder on this node. Raises DdpSlurmError, or OSError."""
    if find_spec("aiohttp") is None or find_spec("filelock") is None:
        raise DdpSlurmError(
            f"--dataset needs aiohttp and filelock in {sys.executable}: pip install "
            "'ddp_slurm[data]'"
        )
    from ddp_slurm.data.cache import Cache, default_folder
    from ddp_slurm.data.fetch import obtain
    from ddp_slurm.data.token import find_token

    cache = Cache(Path(folder) if folder else default_folder())
    return asyncio.run(obtain(url, find_token(), cache, _member()))


def _member() -> "Member":
    from ddp_slurm.data.swarm import Member

    rank_env, job_env = RankEnv.from_environ(), JobEnv.from_environ()
    node = rank_env.node_rank
    return Member(
        job=_job(job_env),
        node=_host() if node is None else str(node),
        nodes=len(job_env.tasks_per_node or (1,)),
        seeds=not rank_env.local_rank,
    )


def _job(job_env: JobEnv) -> str:
    """The same on all ranks of a job; its token does not follow from it."""
    if job_env.token is not None:
        return hashlib.sha256(f"data {job_env.token}".encode()).hexdigest()
    return os.environ.get("SLURM_JOB_ID", "")


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _place() -> str:
    """``rank 3 on alpha``."""
    try:
        return f"rank {RankEnv.from_environ().rank} on {_host()}"
    except DdpSlurmError:
        return _host()


def _stop(signum: int, frame: FrameType | None) -> None:
    """SIGUSR2, sent ahead of the time limit: a job that may be requeued goes on from the pieces
    that have arrived. Raises SystemExit, which lets asyncio and the lock clean up."""
    signal.signal(signum, signal.SIG_IGN)  # torchrun's agent and Slurm may both send it
    print(f"{_place()}: stopped during the fetch; what has arrived is kept", file=sys.stderr)
    marker = JobEnv.from_environ().requeue_marker
    if not marker:
        sys.exit(128 + signum)
    if RankEnv.from_environ().rank == 0:
        Path(marker).write_text("during the fetch of its data set")
    sys.exit(0)


def command_of(words: Sequence[str]) -> list[str]:
    """CMD, with this interpreter for a bare python and before a script."""
    first, *rest = words
    if first in ("python", "python3"):
        return [sys.executable, *rest]
    return script_command(words)


def main(argv: list[str]) -> int:
    """Exec the command; returns only where that is not possible, with the exit status."""
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{__doc__}\n{USAGE}")
        return 0
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:split], argv[split + 1 :]
    if not command or len(options) not in (1, 3) or (options[1:2] not in ([], ["--cache"])):
        print(USAGE, file=sys.stderr)
        return 2
    url = options[0]
    signal.signal(signal.SIGUSR2, _stop)
    try:
        folder = fetch(url, options[2] if options[1:] else None)
    except (DdpSlurmError, OSError) as error:
        print(f"error: {_place()}: data set {url}: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    os.environ[DATA] = str(folder)
    os.environ.pop(DATA_TOKEN, None)  # the training has no need of it
    return become(command_of(command), os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
