"""What a rank's command is: a Python program, or a launcher that starts ranks of its own."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from ddp_slurm.errors import DdpSlurmError

LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
)
SPANS_NODES = ("--nnodes", "--num_machines", "--num-machines", "--hostfile", "--node-rank")
"""Options of a launcher that is started once a node and joins the others."""
PACKAGE = "ddp_slurm"
"""Of modules that become the process of a rank; nothing here imports them."""
RUN = f"{PACKAGE}.run"
DATA_NODE = f"{PACKAGE}.data.node"
SCRIPTS = f"{PACKAGE}.training.scripts"
NEEDS_VARIABLES = re.compile(
    r"DistributedDataParallel|init_process_group|\b(Accelerator|Trainer|Fabric)\("
)
"""What scripts for torchrun have in them."""
ACCELERATORS = (
    "/dev/nvidia[0-9]*",
    "/dev/kfd",
    "/dev/dxg",
    "/dev/dri/render*",
    "/dev/davinci*",
    "/dev/accel*",
)
"""Device files of NVIDIA, AMD, Windows' Linux, Intel, Huawei and others."""
PYTHON = re.compile(r"python[0-9.]*")


class CommandError(DdpSlurmError):
    """A command that cannot be what every rank runs."""


def launcher_in(command: Sequence[str]) -> str | None:
    """The launcher that a command starts on each rank as a world of its own, such as ``torchrun``.

    None for other commands, and for a launcher that is given the other nodes.
    """
    if any(word.startswith(SPANS_NODES) for word in command):
        return None
    name = os.path.basename(command[0]) if command else ""
    if name in LAUNCHERS:
        return name
    if name == "accelerate" and "launch" in command[1:2]:
        return "accelerate launch"
    if PYTHON.fullmatch(name):
        _, program = _python_options(command[1:])
        if program[:1] == ["-m"] and program[1:2] and program[1] in LAUNCHER_MODULES:
            return f"python -m {program[1]}"
    return None


def launcher_error(launcher: str) -> str:
    """Why a launcher cannot be the command of every rank, and what can."""
    return (
        f"the command is a launcher, {launcher}, and would start a world of its own on every rank: "
        "as many separate trainings. Give the script in its place: "
        "python -m ddp_slurm.run train.py ...; or ddp-slurm submit --launcher torchrun"
    )


def forgotten_run(command: Sequence[str]) -> str | None:
    """A line for a command whose script reads torchrun's variables, which srun does not set.

    None for one that sets or needs none, as far as its text shows it.
    """
    words = [word for word in command if word.endswith(".py")]
    if not words or RUN in command:
        return None
    try:
        with open(words[0], encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    if "ddp_slurm" in text or "SLURM_" in text or not NEEDS_VARIABLES.search(text):
        return None
    return (
        f"{words[0]} seems to read torchrun's variables (RANK, WORLD_SIZE, ...), which srun does "
        "not set: every rank would train by itself, or stop. Give -- python -m ddp_slurm.run "
        f"{words[0]} ..., or --launcher torchrun"
    )


def script_command(command: Sequence[str]) -> list[str]:
    """The command, with this interpreter before a script."""
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def become(command: list[str], environ: Mapping[str, str]) -> int:
    """Exec the command. Returns only where that is not possible: the exit status of a shell."""
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def uneven_command(command: Sequence[str]) -> list[str]:
    """The command of a Python program that trains on uneven shares without being changed.

    ``python`` is this interpreter, which has ddp_slurm. Raises CommandError for a command that is
    not a Python program.
    """
    first, *rest = command
    if first.endswith(".py"):
        return [sys.executable, "-m", SCRIPTS, *command]
    if PYTHON.fullmatch(os.path.basename(first)):
        python = sys.executable if first in ("python", "python3") else first
        options, program = _python_options(rest)
        if program:
            return [python, *options, "-m", SCRIPTS, *program]
    path = shutil.which(first)
    interpreter = _interpreter(path) if path else None
    if path is None or interpreter is None:
        raise CommandError(
            f"--uneven starts the Python program itself, and {first!r} is not one. Give python "
            "train.py ..., python -m module ... or a console script; in a shell script put "
            "python -m ddp_slurm.run --uneven before the line that starts the training"
        )
    return [*interpreter, "-m", SCRIPTS, path, *rest]


def _python_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and the script, module or text with its arguments."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
        index += 2 if words[index] in ("-W", "-X") else 1
    return list(words[:index]), list(words[index:])


def _interpreter(path: str) -> list[str] | None:
    """The Python of a console script's first line; None for other programs."""
    try:
        with open(path, "rb") as file:
            line = file.readline(500).decode("utf-8", "replace")
    except OSError:
        return None
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    name = words[-1] if words[:1] == ["/usr/bin/env"] else "".join(words[:1])
    return words if PYTHON.fullmatch(os.path.basename(name)) else None
