"""The daemons of a lab: munged and slurmctld beside the switch, one slurmd a node."""

import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddp_slurm.ask import Answer, ask
from ddp_slurm.files import write_whole
from ddp_slurm.lab import network
from ddp_slurm.lab.errors import LabError
from ddp_slurm.lab.layout import LabLayout, LabNode
from ddp_slurm.slurm_client.records import read_nodes

SLURMCTLD_PORT = 6817
START_SECONDS = 60.0
POLL_SECONDS = 0.05
ANSWER_SECONDS = 20.0
"""A slurmctld that is running answers at once; a client itself gives up after almost a minute."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def slurm_version(lab: LabLayout) -> str:
    """``22.05.8``, of the release that the lab's daemons belong to."""
    answer = lab.ask(["slurmd", "-V"])
    match = re.search(r"[0-9]+\.[0-9]+\.[0-9]+", answer.out)
    if not match:
        raise LabError(f"slurmd -V: expected a release such as 22.05.8, got {answer.text!r}")
    return match[0]


def start_munged(lab: LabLayout) -> None:
    """Start a munged with its own key and socket: another one on the machine is not disturbed."""
    folder = lab.folder / "munge"
    folder.mkdir()
    write_whole(folder / "munge.key", secrets.token_bytes(1024), 0o400)
    log = lab.log_folder / "munged.log"
    options = {
        "key-file": folder / "munge.key",
        "socket": folder / "socket",
        "pid-file": folder / "munged.pid",
        "seed-file": folder / "munged.seed",
        "log-file": log,
    }
    # --force: as root, instead of the user munge, who need not exist in another release's root.
    argv = ["munged", "--force", *(f"--{name}={value}" for name, value in options.items())]
    _start(lab, argv, log)
    _wait((folder / "socket").is_socket, lambda: f"munged does not start\n{log_tail(log)}")


def start_slurmctld(lab: LabLayout) -> None:
    log = lab.log_folder / "slurmctld.log"
    _start(lab, ["slurmctld", "-f", str(lab.slurm_conf)], log)
    _wait(
        lambda: network.listens(lab.switch, SLURMCTLD_PORT),
        lambda: f"slurmctld does not respond\n{log_tail(log)}",
        lambda: not is_running(lab, None, "slurmctld"),
    )


def start_slurmd(lab: LabLayout, *nodes: LabNode) -> None:
    """Start the nodes' slurmd, all at once."""

    def start(node: LabNode) -> Answer:
        (lab.folder / "spool" / node.name).mkdir(exist_ok=True)
        return _launch(lab, node, ["slurmd", "-N", node.name, "-f", str(lab.slurm_conf)])

    with ThreadPoolExecutor(max_workers=len(nodes)) as threads:
        answers = list(threads.map(start, nodes))
    errors = [
        _failure("slurmd", node.name, answer, slurmd_log(lab, node))
        for node, answer in zip(nodes, answers, strict=True)
        if answer.status
    ]
    if errors:
        raise LabError("\n".join(errors))


def slurmd_log(lab: LabLayout, node: LabNode) -> Path:
    return lab.log_folder / f"slurmd.{node.name}.log"


def node_states(lab: LabLayout) -> dict[str, str]:
    """Slurm's state of each node, in the order of the cluster: ``{"beta": "IDLE+DRAIN"}``."""
    answer = lab.ask(["scontrol", "show", "node"], ANSWER_SECONDS)
    if answer.status:
        raise LabError(f"lab {lab.name!r}: slurmctld does not respond: {answer.text}")
    states = {record.name: record.state for record in read_nodes(answer.out)}
    return {node.name: states.get(node.name, "UNKNOWN") for node in lab.nodes}


def wait_for_nodes(lab: LabLayout) -> None:
    """Wait until every node is idle, which takes about a second.

    Raises LabError, with the daemons' errors, where that does not happen.
    """

    def not_idle() -> list[tuple[LabNode, str]]:
        states = node_states(lab)
        return [(node, states[node.name]) for node in lab.nodes if states[node.name] != "IDLE"]

    def message() -> str:
        return "\n".join(
            f"node {node.name} does not become idle; its state is {state}\n"
            f"{log_tail(slurmd_log(lab, node))}"
            for node, state in not_idle()
        )

    def all_idle() -> bool:
        try:
            return not not_idle()
        except LabError:  # on a busy machine slurmctld may not respond yet
            return False

    _wait(
        all_idle,
        message,
        lambda: not all(is_running(lab, node, "slurmd") for node in lab.nodes),
    )


def is_running(lab: LabLayout, node: LabNode | None, program: str) -> bool:
    """Whether a program of that name runs on a node, or with None on slurmctld's host."""
    pids = network.processes(node.netns if node else lab.switch)
    return any(_program_name(pid) == program for pid in pids)


def _program_name(pid: int) -> str:
    try:
        program = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]
    except OSError:  # the process has ended
        return ""
    return os.path.basename(program)


def _start(lab: LabLayout, argv: list[str], log: Path) -> None:
    answer = _launch(lab, None, argv)
    if answer.status:
        raise LabError(_failure(argv[0], lab.controller, answer, log))


def _launch(lab: LabLayout, node: LabNode | None, argv: list[str]) -> Answer:
    """Run a daemon that goes into the background by itself, from / and with a plain environment."""
    environ = {
        "PATH": PATH,
        "HOME": "/root",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "TMPDIR": "/tmp",
    }
    return ask(["env", "-C", "/", *lab.inside(node, argv)], environ=environ)


def _failure(program: str, host: str, answer: Answer, log: Path) -> str:
    return f"{program} on {host} does not start: {answer.err.strip()}\n{log_tail(log)}".rstrip()


def _wait(
    done: Callable[[], bool],
    message: Callable[[], str],
    hopeless: Callable[[], bool] = lambda: False,
) -> None:
    """Wait for ``done``; raises LabError with ``message`` after START_SECONDS or when hopeless."""
    give_up = time.monotonic() + START_SECONDS
    while not done():
        if time.monotonic() > give_up or hopeless():
            raise LabError(message())
        time.sleep(POLL_SECONDS)


def log_tail(path: Path, lines: int = 8) -> str:
    """The last lines of a daemon's log: its errors, or the log's end where it has none."""
    try:
        text = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    errors = [line for line in text if "error:" in line or "fatal:" in line]
    shown = errors or text
    return "\n".join(f"  {path.name}: {line}" for line in shown[-lines:])
