"""``python -m ddp_slurm.run CMD ...``: run any env:// training script on this rank.

Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT from what the launcher left
in the environment, then becomes CMD. Standard library only: it runs once on every rank.
"""

import os
import sys

from .errors import DdpSlurmError
from .rank_env import RankEnv

USAGE = "usage: python -m ddp_slurm.run CMD ...   (inside an srun step, or another launcher's rank)"


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
        env = {**os.environ, **RankEnv.from_environ().env_variables()}
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
