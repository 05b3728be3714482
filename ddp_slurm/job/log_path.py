"""Where a job's log lies, and beside it the folders of what was submitted."""

import os
import pwd
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from ddp_slurm.job.options import OptionsError
from ddp_slurm.plan import Plan

RUNS_FOLDER = "ddp_slurm_runs"


def with_log_path(plan: Plan, *, make_folder: bool) -> Plan:
    """The plan with ``~`` and ``$USER`` in the log's path expanded, and its folder made.

    Slurm takes these as they stand, and a job whose log folder is missing dies without a word.
    """
    given = plan.options.output
    path = os.path.expandvars(os.path.expanduser(given))
    unknown = re.search(r"\$\w+|\$\{[^}]*\}", path)
    if unknown:
        raise OptionsError(f"--output: {given!r}: the variable {unknown[0]} is not set here")
    pattern, name = os.path.split(path)
    folder = _filled(pattern, {"%x": plan.name, "%u": user_name(), "%%": "%"})
    if folder is None:
        raise OptionsError(
            f"--output: {given!r}: Slurm makes no folder, and of one only %x and %u are known before the job is "
            "submitted; put the other patterns into the file's name"
        )
    if not name or os.path.isdir(os.path.join(folder, name)):
        raise OptionsError(
            f"--output: {given!r} is a folder; name a file, as in {os.path.join(given, '%x-%j.out')!r}"
        )
    if make_folder and folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as fault:
            raise OptionsError(
                f"--output: the folder {folder!r} cannot be made: {fault.strerror}"
            ) from None
    here = os.getcwd()
    if "%" in here:  # Slurm puts it before the path, and then takes it for a pattern
        folder = os.path.join(here, folder)
    return plan.with_output(os.path.join(folder.replace("%", "%%"), name))


def log_path(plan: Plan, job_id: str) -> str | None:
    """The log file of a job. None for patterns of sbatch whose values are known on the cluster only."""
    values = {"%x": plan.name, "%j": job_id, "%A": job_id, "%u": user_name(), "%%": "%"}
    path = _filled(plan.options.output, values)
    return path and os.path.abspath(path)


def _filled(text: str, values: Mapping[str, str]) -> str | None:
    """The text with its patterns replaced, None where one is not among the values."""
    parts = re.split(r"(%.)", text)
    if any(part not in values for part in parts[1::2]):
        return None
    return "".join(values.get(part, part) for part in parts)


def runs_folder(output: str) -> Path:
    """The folder of the run folders: beside the log, above the first part of its path that holds a pattern.

    Beside a device such as /dev/null nothing is kept: then it is in the current folder.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        output = "log"
    parts = Path(output).parent.parts
    fixed = [
        part.replace("%%", "%")
        for part in takewhile(lambda part: "%" not in part.replace("%%", ""), parts)
    ]
    return Path(os.path.abspath(os.path.join("", *fixed))) / RUNS_FOLDER


def user_name() -> str:
    """Of the uid, as Slurm has it: the variables are another user's after a plain ``su``."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a bare uid, as in some containers
        return str(os.geteuid())
