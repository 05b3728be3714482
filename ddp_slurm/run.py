"""``python -m ddp_slurm.run CMD ...``: run any env:// training script on this rank.

Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT from
what the launcher left in the environment, and torchrun's mark, then becomes CMD. With --uneven a
script that uses DistributedDataParallel and a DataLoader trains on the plan's shares of the batch.
Standard library only: it runs once on every rank.
"""

import glob
import os
import sys
from collections.abc import Mapping, Sequence

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.launchers import (
    ACCELERATORS,
    CommandError,
    become,
    launcher_error,
    launcher_in,
    script_command,
    uneven_command,
)
from ddp_slurm.rank_env import RankEnv, tasks_per_node

USAGE = """\
usage: python -m ddp_slurm.run [--uneven] CMD ...
       (inside an srun step, or another launcher's rank)"""


def script_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a script that reads torchrun's variables and none of Slurm's.

    What is set already stays, but for the place in the world. Raises LaunchError as RankEnv does.
    """
    rank_env = RankEnv.from_environ(environ)
    defaults = _torchrun_variables(rank_env, environ)
    if not any(glob.glob(pattern) for pattern in ACCELERATORS):
        # without a GPU Accelerate would take every rank for a world of its own
        defaults["ACCELERATE_USE_CPU"] = "true"
    return {**defaults, **environ, **rank_env.env_variables()}


def _torchrun_variables(rank_env: RankEnv, environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun sets besides the place in the world: nodes are its groups, and all ranks have
    one role.

    TORCHELASTIC_RUN_ID is the mark by which Lightning recognises a torchrun rank. Without it
    Lightning would take the SLURM_* variables, also those that belong to another component.
    """
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    variables = {
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank_env.rank),
        "ROLE_WORLD_SIZE": str(rank_env.world_size),
        "TORCHELASTIC_RUN_ID": environ.get("SLURM_JOB_ID", "ddp_slurm"),
        "TORCHELASTIC_RESTART_COUNT": restarts,
        # how many Slurm would do more is not known here
        "TORCHELASTIC_MAX_RESTARTS": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if rank_env.node_rank is not None:
        variables["GROUP_RANK"] = str(rank_env.node_rank)
    nodes = len(tasks_per_node(environ))
    if nodes:
        variables["GROUP_WORLD_SIZE"] = str(nodes)
    return variables


def rank_command(argv: Sequence[str], *, is_uneven: bool, world_size: int) -> list[str]:
    """What a rank runs for the command that was typed. Raises CommandError."""
    launcher = launcher_in(argv)
    if launcher is not None and world_size > 1:
        raise CommandError(launcher_error(launcher))
    if is_uneven:
        return uneven_command(argv)
    return script_command(argv)


def main(argv: list[str]) -> int:
    """Exec the command; returns only where that is not possible, with the exit status."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}")
        return 0
    is_uneven = argv[:1] == ["--uneven"]
    if is_uneven:
        argv = argv[1:]
    if argv and argv[0] == "--":
        argv = argv[1:]
    if not argv:
        print(f"error: no command\n{USAGE}", file=sys.stderr)
        return 2
    try:
        environ = script_environ(os.environ)
        command = rank_command(argv, is_uneven=is_uneven, world_size=int(environ["WORLD_SIZE"]))
    except DdpSlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return become(command, environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
