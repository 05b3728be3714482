"""The path of a job's log."""

import os
import re
from collections.abc import Mapping

from ddp_slurm.errors import quoted
from ddp_slurm.job.options import JobOptions, OptionsError
from ddp_slurm.user import user_name

WITH_A_BACKSLASH = "with which Slurm replaces no pattern in the path of a log and drops characters"


def with_log_path(options: JobOptions, job_name: str) -> JobOptions:
    """The options with ``~``, ``$USER`` and the folders' ``%x`` in ``output`` expanded.

    Slurm does not expand them. Makes no folder. Raises OptionsError.
    """
    folder, name = _checked_parts(options.output, job_name)
    here = os.getcwd()
    if "%" in here:  # Slurm puts it before a relative path, and then takes it for a pattern
        folder = os.path.join(here, folder)
    return options.replaced(output=os.path.join(folder.replace("%", "%%"), name))


def _checked_parts(output: str, job_name: str) -> tuple[str, str]:
    """The folder of the log, without patterns, and the name of its file, which may hold some."""
    path = os.path.expandvars(os.path.expanduser(output))
    if "\\" in path:
        raise OptionsError(f"--output: {quoted(output)} has a backslash, {WITH_A_BACKSLASH}")
    unknown = re.search(r"\$\w+|\$\{[^}]*\}", path)
    if unknown:
        raise OptionsError(f"--output: {quoted(output)}: the variable {unknown[0]} is not set here")
    pattern, name = os.path.split(path)
    folder = _filled(pattern, {"%x": job_name, "%u": user_name(), "%%": "%"})
    if folder is None:
        raise OptionsError(
            f"--output: {quoted(output)}: Slurm makes no folder, and in a folder's name only %x "
            "and %u are known before the job is submitted; move the other patterns to the file's "
            "name"
        )
    if not name or os.path.isdir(os.path.join(folder, name)):
        example = os.path.join(output, "%x-%j.out")
        raise OptionsError(
            f"--output: {quoted(output)} is a folder; name a file, as in {quoted(example)}"
        )
    return folder, name


def make_log_folder(options: JobOptions) -> None:
    """Make the folder of a log whose path is expanded.

    Slurm makes none, and a job without it ends without any message. Raises OptionsError.
    """
    folder = os.path.dirname(options.output).replace("%%", "%")
    here = os.getcwd()  # which Slurm puts before a relative path
    if "\\" in here and not os.path.isabs(options.output):
        raise OptionsError(
            f"--output: {quoted(here)} has a backslash, {WITH_A_BACKSLASH}; "
            "give an absolute path in another folder"
        )
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as error:
        raise OptionsError(
            f"--output: the folder {quoted(folder)} cannot be made: {error.strerror}"
        ) from None


def log_path(options: JobOptions, job_name: str, job_id: str) -> str | None:
    """The log file of a job; None where ``output`` has patterns whose values only Slurm knows."""
    values = {"%x": job_name, "%j": job_id, "%A": job_id, "%u": user_name(), "%%": "%"}
    path = _filled(options.output, values)
    return path and os.path.abspath(path)


def _filled(text: str, values: Mapping[str, str]) -> str | None:
    """The text with its patterns replaced; None where one of them is not among the values."""
    parts = re.split(r"(%.)", text)
    patterns = parts[1::2]
    if any(pattern not in values for pattern in patterns):
        return None
    return "".join(values.get(part, part) for part in parts)
