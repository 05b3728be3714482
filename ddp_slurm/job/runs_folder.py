"""Where the run folders are; standard library only, since a look at a job needs no more."""

import os
from itertools import takewhile
from pathlib import Path

RUNS_FOLDER = "ddp_slurm_runs"


def runs_folder(output: str) -> Path:
    """The folder of the run folders: beside the log, above the first folder that has a pattern.

    Nothing can be kept beside a device such as /dev/null: then it is in the current folder.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        output = "log"
    fixed = takewhile(_has_no_pattern, Path(output).parent.parts)
    folder = os.path.join("", *(part.replace("%%", "%") for part in fixed))
    return Path(os.path.abspath(folder)) / RUNS_FOLDER


def _has_no_pattern(part: str) -> bool:
    return "%" not in part.replace("%%", "")
