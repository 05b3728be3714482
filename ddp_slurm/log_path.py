"""Where a job's log lies, and beside it the folders of what was submitted."""

import os
import pwd
import re
from pathlib import Path

from .options import OptionsError
from .plan import Plan

RUNS_FOLDER = "ddp_slurm_runs"


def with_log_path(plan: Plan, *, make_folder: bool) -> Plan:
    """The plan with ``~`` and ``$USER`` in the log's path expanded: Slurm takes them as they stand, and a job whose log
    folder is missing dies without a word."""
    path = os.path.expandvars(os.path.expanduser(plan.options.output))
    unknown = re.search(r"\$\w+|\$\{[^}]*\}", path)
    if unknown:
        raise OptionsError(f"--output: {plan.options.output!r}: the variable {unknown[0]} is not set here")
    folder = os.path.dirname(path)
    if make_folder and folder and "%" not in folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as fault:
            raise OptionsError(f"--output: the folder {folder!r} cannot be made: {fault.strerror}") from None
    return plan.with_output(path)


def log_path(plan: Plan, job_id: str) -> str | None:
    """The log file of a job. None for patterns of sbatch whose values are known on the cluster only."""
    values = {"%x": plan.name, "%j": job_id, "%A": job_id, "%u": user_name(), "%%": "%"}
    parts = re.split(r"(%.)", plan.options.output)
    if any(part not in values for part in parts[1::2]):
        return None
    return os.path.abspath("".join(values.get(part, part) for part in parts))


def runs_folder(output: str) -> Path:
    """The folder of the run folders: beside the log, above the first part of its path that holds a pattern.

    Beside a device such as /dev/null nothing is kept: then it is in the current folder.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        output = "log"
    parts = Path(os.path.abspath(output)).parent.parts
    fixed = next((i for i, part in enumerate(parts) if "%" in part), len(parts))
    return Path(*parts[:fixed]) / RUNS_FOLDER


def user_name() -> str:
    """Of the uid, as Slurm has it: the variables are another user's after a plain ``su``."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a bare uid, as in some containers
        return str(os.geteuid())
