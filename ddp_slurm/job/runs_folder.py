"""Where the run folders are; standard library only, since a look at a job needs no more."""

import os
from itertools import takewhile
from pathlib import Path

from ddp_slurm import trust

RUNS_FOLDER = "ddp_slurm_runs"


def names_of_runs_folder() -> tuple[str, str]:
    """The usual name, and the one where another user already has a folder of that name."""
    return RUNS_FOLDER, f"{RUNS_FOLDER}.{os.geteuid()}"


def runs_folder(output: str) -> Path:
    """The folder for the run folders of a job with that log, which may not exist yet."""
    return runs_folder_in(place_of_runs(output))


def runs_folder_in(folder: Path) -> Path:
    """The folder of this user's run folders in ``folder``: nobody else can write into it.

    One user has ``ddp_slurm_runs``, the others have ``ddp_slurm_runs.UID``.
    """
    usual, own = (folder / name for name in names_of_runs_folder())
    try:
        if os.path.lexists(usual) and not trust.is_own_folder(usual):
            return own
    except OSError:  # a link to nothing, or a folder that cannot be searched
        return own
    # Of a link the target: the job script follows none.
    return usual.resolve() if usual.is_symlink() else usual


def place_of_runs(output: str) -> Path:
    """Where the folder of the run folders is: beside the log, above the first folder of a pattern.

    Nothing can be kept beside a device such as /dev/null: then it is the current folder.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        output = "log"
    fixed = takewhile(_has_no_pattern, Path(output).parent.parts)
    folder = os.path.join("", *(part.replace("%%", "%") for part in fixed))
    return Path(os.path.abspath(folder))


def _has_no_pattern(part: str) -> bool:
    return "%" not in part.replace("%%", "")
