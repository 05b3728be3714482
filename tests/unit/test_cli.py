"""``ddp-slurm`` itself: what is typed wrong is a message and status 2, and every command has its help."""

import subprocess
import sys

import pytest

from ddp_slurm import __version__


def cli(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "ddp_slurm.cli", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "usage: ddp-slurm"),
        ("cluster", "usage: ddp-slurm cluster"),
        ("stauts 48", "invalid choice: 'stauts' (choose from"),
        ("status", "the following arguments are required: JOBID"),
        ("status 48 --jsn", "no such option: --jsn; did you mean '--json'?"),
        ("status 48 --js", "no such option: --js; did you mean '--json'?"),  # an abbreviation is refused, too
        ("cancel 48 49", "unexpected '49'"),
        ("logs 48 --rank x", "argument --rank: 'x' is not a whole number, such as 4"),
        ("logs 48 --rank=-1", "argument --rank: '-1' is not a whole number, such as 4"),
        ("doctor --via rsh", "argument --via: invalid choice: 'rsh'"),
        ("cluster configs --outptu x", "no such option: --outptu; did you mean '--output'?"),
        ("lab exec alpha", "no command: what is to run on alpha?"),
    ],
)
def test_what_is_typed_wrong(typed: str, words: str) -> None:
    done = cli(*typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["", "submit", "plan", "status", "logs", "cancel", "discover", "doctor", "cluster", "cluster probe",
     "cluster configs", "cluster install", "lab", "lab up", "lab down", "lab exec", "lab kill", "lab revive", "lab status"],
)  # fmt: skip
def test_every_command_has_its_help(command: str) -> None:
    done = cli(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ddp-slurm {command}".rstrip())


def test_version() -> None:
    assert cli("--version").stdout == f"ddp-slurm {__version__}\n"
