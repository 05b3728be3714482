"""A Slurm of stubs, and job scripts that run in it."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..waiting import wait_until

RUNNING = "7 RUNNING 0 N/A\n8 RUNNING 0 N/A\n9 RUNNING 0 N/A\n"

SQUEUE = """
cd "$FAKE_SLURM"
case "$*" in *--steps*) exec cat steps ;; *) exec cat components ;; esac
"""
SCONTROL = """
cd "$FAKE_SLURM"
case "$*" in
*"show node "*) exec cat nodes ;;
"show hostnames "*) echo "$3" | tr , '\\n'; exit ;;
esac
echo "scontrol $*" >>calls
answer=$(head -n 1 answers) && sed -i 1d answers
[[ -z $answer ]] || { echo "$answer"; exit 1; }
"""
SCANCEL = 'cd "$FAKE_SLURM"; echo "scancel $*" >>calls; : >steps'


def node_record(slurmd_start: str) -> str:
    return f"NodeName=alpha Arch=x86_64 BootTime=None SlurmdStartTime={slurmd_start} Extra=x\n"


@dataclass
class FakeSlurm:
    """What the stubs of Slurm's clients answer, as files in a folder, and how they were called."""

    folder: Path

    def set(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def processes_of(group: int) -> list[str]:
    """The command lines of the processes of a group; those that have ended do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                command = (stat.parent / "cmdline").read_bytes()
                found.append(command.replace(b"\0", b" ").decode())
    return found


@dataclass
class Script:
    """A job script and its log; run as slurmstepd does."""

    text: str
    folder: Path

    def start(self, **env: str) -> "subprocess.Popen[str]":
        script = self.folder / "job.sh"
        script.write_text(self.text)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environ |= {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3", **env}
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", script],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, **env: str) -> int:
        """Its exit status. No process of it is left after it."""
        with self.start(**env) as process:
            status = process.wait(timeout=60)
            try:
                wait_until(lambda: not processes_of(process.pid), "the script's processes", 5)
            except AssertionError:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return status

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def exit_marker(self) -> str | None:
        path = self.folder / "runs" / "7" / "exit"
        return path.read_text() if path.exists() else None


MakeScript = Callable[..., Script]
