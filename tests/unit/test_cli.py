"""``ddp-slurm`` itself: messages, exit statuses, help, and what a command imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm import __version__
from ddp_slurm.cli import COMMANDS


def cli(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "ddp_slurm.cli", *words], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "usage: ddp-slurm"),
        ("cluster", "usage: ddp-slurm cluster"),
        ("stauts 48", "invalid choice: 'stauts' (choose from"),
        ("status", "the following arguments are required: JOBID"),
        ("status 48 --jsn", "no such option: --jsn; did you mean '--json'?"),
        (
            "status 48 --js",
            "no such option: --js; did you mean '--json'?",
        ),  # an abbreviation is refused, too
        ("--foo plan", "no such option: --foo; known are --help, --version, -h"),
        ("cancel 48 49", "unexpected '49'"),
        ("logs 48 --rank x", "argument --rank: 'x' is not a whole number, such as 4"),
        ("logs 48 --rank=-1", "argument --rank: '-1' is not a whole number, such as 4"),
        ("doctor --via rsh", "argument --via: invalid choice: 'rsh'"),
        ("cluster configs --outptu x", "no such option: --outptu; did you mean '--output'?"),
        ("lab exec alpha", "no command; write it after alpha"),
        (
            "lab exec alpha --name x ls",
            "expected a command after alpha, got the option '--name'; "
            "options of lab exec are written before alpha",
        ),
    ],
)
def test_command_line_errors(typed: str, words: str) -> None:
    done = cli(*typed.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


STREAMS = {
    "full": ("ddp plan >/dev/full", 2, "error: No space left on device\n"),
    "closed": ("ddp plan >&-", 0, ""),
    "all closed": ("ddp plan <&- >&- 2>&-", 0, ""),
    "a message without a reader": ("ddp status x 2> >(exec true)", 2, ""),
    "a message without a stream": ("ddp status x 2>&-", 2, ""),
    "no current folder": (
        "mkdir x; cd x; rmdir ../x; "
        "ddp submit --backend sbatch --dry-run --cluster $OLDPWD/cluster.yaml x",
        2,
        "error: the current folder does not exist any more; go to another one\n",
    ),
    "not UTF-8": (
        "ddp submit --script s.sh caf$'\\xe9'.py",
        2,
        """error: "_ddp_command=(python3 'caf\\udce9.py')": """
        """'\\udce9' cannot be written as utf-8\n""",
    ),
    "not ASCII": (
        "ddp submit --backend sbatch --dry-run --name \u00f6 x",
        2,
        """error: '#SBATCH --job-name="\\xf6"': '\\xf6' cannot be written as ascii\n""",
    ),
}


@pytest.mark.parametrize("case", STREAMS)
def test_unwritable_streams_and_names(case: str, uneven: Path) -> None:
    line, status, said = STREAMS[case]
    env = {**os.environ, "PYTHONIOENCODING": "ascii" if case == "not ASCII" else "utf-8"}
    env.pop("PYTHONUNBUFFERED", None)  # what is left in the buffer is written at exit
    shell = f"ddp() {{ '{sys.executable}' -m ddp_slurm.cli \"$@\"; }}; {line}"
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=uneven.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr, done.stdout) == (status, said, "")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "submit",
        "plan",
        "status",
        "logs",
        "cancel",
        "discover",
        "doctor",
        "cluster",
        "cluster probe",
        "cluster configs",
        "cluster install",
        "lab",
        "lab up",
        "lab down",
        "lab exec",
        "lab kill",
        "lab revive",
        "lab status",
    ],
)
def test_help_of_every_command(command: str) -> None:
    done = cli(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ddp-slurm {command}".rstrip())


@pytest.mark.parametrize("words", [["--help"], ["-h", "status"]])
def test_help_lists_every_command_with_its_docstring(words: list[str]) -> None:
    from ddp_slurm.cluster.discover import discover_command
    from ddp_slurm.plan.commands import show_plan
    from ddp_slurm.runs.commands import cancel, logs, status
    from ddp_slurm.submit import submit

    done = subprocess.run(
        [sys.executable, "-m", "ddp_slurm.cli", *words],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=True,
    )
    helps = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:4] == "    ")
    assert list(helps) == [name for names in COMMANDS.values() for name in names]
    for name, function in {
        "submit": submit,
        "plan": show_plan,
        "status": status,
        "logs": logs,
        "cancel": cancel,
        "discover": discover_command,
    }.items():
        assert helps[name] == str(function.__doc__).partition("\n")[0]


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["--version"], ["dataclasses", "yaml", "subprocess", "ddp_slurm.schema"]),
        (
            ["status", "1"],
            ["jinja2", "yaml", "ddp_slurm.plan", "ddp_slurm.submit", "ddp_slurm.lab"],
        ),
        (["plan"], ["jinja2", "difflib", "tempfile", "ddp_slurm.render", "ddp_slurm.backends"]),
        (["submit"], ["difflib", "ddp_slurm.runs", "ddp_slurm.admin"]),
    ],
)
def test_command_imports_only_what_it_uses(words: list[str], unused: list[str]) -> None:
    code = "import sys, ddp_slurm.cli as c; c.make_parser(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(unused) & set(done.stdout.split())


def test_version() -> None:
    assert cli("--version").stdout == f"ddp-slurm {__version__}\n"
