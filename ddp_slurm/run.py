"""``python -m ddp_slurm.run CMD ...``: run any env:// training script on this rank.

Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT from what the launcher left
in the environment, and torchrun's mark, then becomes CMD. Standard library only: it runs once on every rank.
"""

import glob
import os
import sys
from collections.abc import Mapping

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.rank_env import RankEnv

USAGE = "usage: python -m ddp_slurm.run CMD ...   (inside an srun step, or another launcher's rank)"
ACCELERATORS = (
    "/dev/nvidia[0-9]*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri/render*",
    "/dev/davinci*",
    "/dev/accel*",
)
"""Device files of NVIDIA, AMD, Windows' Linux, Intel, Huawei and others."""


def script_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a script that knows torchrun's variables and nothing of Slurm.

    TORCHELASTIC_RUN_ID is the mark by which Lightning knows a torchrun rank. Without it Lightning would take the
    SLURM_* variables, also those that belong to another component. What is set already stays.

    Raises LaunchError as RankEnv does.
    """
    rank_env = RankEnv.from_environ(environ)
    marks = {
        "GROUP_RANK": str(rank_env.node_rank),
        "TORCHELASTIC_RUN_ID": environ.get("SLURM_JOB_ID", "ddp_slurm"),
    }
    if not any(glob.glob(pattern) for pattern in ACCELERATORS):
        marks["ACCELERATE_USE_CPU"] = (
            "true"  # without a GPU Accelerate would take every rank for a world of its own
        )
    return {**marks, **environ, **rank_env.env_variables()}


def main(argv: list[str]) -> int:
    """Exec the command; returns only where that is not possible, with the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}")
        return 0
    if argv and argv[0] == "--":
        argv = argv[1:]
    if not argv:
        print(f"error: no command\n{USAGE}", file=sys.stderr)
        return 2
    try:
        env = script_environ(os.environ)
    except DdpSlurmError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return fault.exit_status
    command = [sys.executable, *argv] if argv[0].endswith(".py") else argv
    try:
        os.execvpe(command[0], command, env)
    except OSError as fault:
        print(f"error: {command[0]}: {fault.strerror}", file=sys.stderr)
        return 127 if isinstance(fault, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
