"""The daemons of a lab: munged and slurmctld beside the switch, one slurmd a node."""

import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_slurm.lab import network
from ddp_slurm.lab.errors import LabError

if TYPE_CHECKING:
    from ddp_slurm.lab.lab import Lab, LabNode

SLURMCTLD_PORT = 6817
START_SECONDS = 60.0
POLL_SECONDS = 0.05
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def slurm_version(lab: "Lab") -> str:
    """``22.05.8``, of the release that the lab's daemons belong to."""
    done = lab.run(["slurmd", "-V"], capture_output=True, text=True)
    match = re.search(r"[0-9]+\.[0-9]+\.[0-9]+", done.stdout)
    if not match:
        raise LabError(
            f"slurmd -V says {(done.stdout or done.stderr).strip()!r}, no release such as 22.05.8"
        )
    return match[0]


def start_munged(lab: "Lab") -> None:
    """A munged with a key and a socket of its own: another one on the machine is neither used nor disturbed."""
    folder = lab.folder / "munge"
    folder.mkdir()
    with open(
        os.open(folder / "munge.key", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o400), "wb"
    ) as key:
        key.write(secrets.token_bytes(1024))
    log = lab.folder / "log" / "munged.log"
    options = {
        "key-file": folder / "munge.key",
        "socket": folder / "socket",
        "pid-file": folder / "munged.pid",
        "seed-file": folder / "munged.seed",
        "log-file": log,
    }
    # --force: as root, instead of the user munge, who need not exist in another release's root.
    argv = ["munged", "--force", *(f"--{name}={value}" for name, value in options.items())]
    _start(lab, None, argv, log)
    _wait(
        lambda: (folder / "socket").is_socket(), lambda: f"munged does not start\n{log_tail(log)}"
    )


def start_slurmctld(lab: "Lab") -> None:
    log = lab.folder / "log" / "slurmctld.log"
    _start(lab, None, ["slurmctld", "-f", str(lab.slurm_conf)], log)
    _wait(
        lambda: network.listens(lab.switch, SLURMCTLD_PORT),
        lambda: f"slurmctld does not answer\n{log_tail(log)}",
        lambda: not lab.daemon_runs(None, "slurmctld"),
    )


def start_slurmd(lab: "Lab", *nodes: "LabNode") -> None:
    """Start the nodes' slurmd, all at once."""
    for node in nodes:
        (lab.folder / "spool" / node.name).mkdir(exist_ok=True)
    launched = [
        _launch(lab, node, ["slurmd", "-N", node.name, "-f", str(lab.slurm_conf)]) for node in nodes
    ]
    faults = []
    for node, process in zip(nodes, launched, strict=True):
        _, error = process.communicate()
        if process.returncode:
            faults.append(_failure("slurmd", node.name, error, slurmd_log(lab, node)))
    if faults:
        raise LabError("\n".join(faults))


def slurmd_log(lab: "Lab", node: "LabNode") -> Path:
    return lab.folder / "log" / f"slurmd.{node.name}.log"


def wait_for_nodes(lab: "Lab") -> None:
    """Wait until Slurm calls every node idle, which takes about a second, or say what the daemons say."""

    def waiting() -> list["LabNode"]:
        states = lab.status()
        return [node for node in lab.nodes if states[node.name] != "IDLE"]

    def message() -> str:
        states = lab.status()
        faults = [
            f"node {node.name} does not become idle (Slurm says {states[node.name]})\n{log_tail(slurmd_log(lab, node))}"
            for node in waiting()
        ]
        return "\n".join(faults)

    _wait(
        lambda: not waiting(),
        message,
        lambda: not all(lab.daemon_runs(node, "slurmd") for node in lab.nodes),
    )


def _start(lab: "Lab", node: "LabNode | None", argv: list[str], log: Path) -> None:
    """Start a daemon that goes into the background by itself."""
    process = _launch(lab, node, argv)
    _, error = process.communicate()
    if process.returncode:
        raise LabError(_failure(argv[0], node.name if node else lab.controller, error, log))


def _launch(lab: "Lab", node: "LabNode | None", argv: list[str]) -> "subprocess.Popen[str]":
    environ = {
        "PATH": PATH,
        "HOME": "/root",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "TMPDIR": "/tmp",
    }
    return subprocess.Popen(
        lab.inside(node, argv),
        env=environ,
        cwd="/",
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _failure(program: str, host: str, error: str, log: Path) -> str:
    return f"{program} on {host} does not start: {error.strip()}\n{log_tail(log)}".rstrip()


def _wait(
    done: Callable[[], bool], message: Callable[[], str], hopeless: Callable[[], bool] | None = None
) -> None:
    give_up = time.monotonic() + START_SECONDS
    while not done():
        if time.monotonic() > give_up or (hopeless and hopeless()):
            raise LabError(message())
        time.sleep(POLL_SECONDS)


def log_tail(path: Path, lines: int = 8) -> str:
    """The last lines of a daemon's log, errors first of all."""
    try:
        text = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    faults = [line for line in text if "error:" in line or "fatal:" in line]
    return "\n".join(f"  {path.name}: {line}" for line in (faults or text)[-lines:])
