"""A script for thousands of nodes on a live slurmctld that has them, and on one without backfill.

No slurmd runs: the nodes are cloud nodes that nobody resumes. That is enough for
``sbatch --test-only``, which plans the job as if it were submitted.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.plan.plan import Component
from ddp_slurm.render import render_sbatch
from tests.slurm.conftest import load_cluster
from tests.waiting import wait_until

NODES = """\
nodes:
  - {name: "titan[0001-1000]", gpus: {type: titan, count: 1}, cpus: 8, memory: 60G}
  - {name: "volta[0001-2000]", gpus: {type: volta, count: 2}, cpus: 16, memory: 120G}
  - {name: "ampere[0001-2000]", gpus: {type: ampere, count: 4}, cpus: 32, memory: 240G}
"""
TWO_NODES = """\
nodes:
  - {name: a, gpus: 1, cpus: 8, memory: 4G}
  - {name: b, gpus: 2, cpus: 8, memory: 4G}
"""

SLURM_CONF = """\
ClusterName=scale
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldParameters=idle_on_node_suspend
SchedulerType={scheduler}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
ResumeProgram=/bin/true
SuspendProgram=/bin/true
TreeWidth=65533
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
Controller = Callable[[str, str], dict[str, str]]


@pytest.fixture
def controller(needs_lab: None, tmp_path: Path) -> Iterator[Controller]:
    """``controller(cluster_yaml, scheduler)``: a slurmctld on the loopback of its own namespace.

    Returns the environment for ``client``.
    """
    with contextlib.ExitStack() as cleanup:
        # Sockets have short paths: the tests' own folders may be too deep.
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="scale")))
        (folder / "state").mkdir()

        def start(text: str, scheduler: str) -> dict[str, str]:
            netns = make_namespace(cleanup)
            plan = make_plan(load_cluster(text, folder), JobOptions())
            nodes = "\n".join(map(node_line, plan.components))
            conf = folder / "slurm.conf"
            conf.write_text(SLURM_CONF.format(folder=folder, scheduler=scheduler, nodes=nodes))
            (folder / "gres.conf").write_text("")
            start_daemon(cleanup, netns, folder, munged(folder))
            wait_until((folder / "munge.socket").is_socket, lambda: logs(folder))
            start_daemon(cleanup, netns, folder, ["slurmctld", "-D", "-f", str(conf)])
            environ = {**os.environ, "SLURM_CONF": str(conf), "NETNS": netns}
            ping = ["scontrol", "ping"]
            wait_until(lambda: client(environ, *ping).returncode == 0, lambda: logs(folder))
            return environ

        yield start


def make_namespace(cleanup: contextlib.ExitStack) -> str:
    """A network with nothing but the addresses that slurmctld wants to see before it listens."""
    netns = f"ddpscale{os.getpid()}"
    subprocess.run(["ip", "netns", "add", netns], check=True)
    cleanup.callback(subprocess.run, ["ip", "netns", "delete", netns], check=True)
    for command in (
        "link set lo up",
        "link add here type bridge",
        "address add 198.18.255.1/32 dev here",
        "link set here up",
    ):
        subprocess.run(["ip", "-n", netns, *command.split()], check=True)
    return netns


def node_line(component: Component) -> str:
    """The nodes of a component in slurm.conf, as cloud nodes."""
    cpus = component.cpus_per_task * component.tasks_per_node
    size = f"CPUs={cpus} RealMemory={component.memory_mb} Gres={component.gres}"
    return f"NodeName={component.nodelist} {size} State=CLOUD NodeAddr=127.0.0.1"


def munged(folder: Path) -> list[str]:
    """The command line of a munged with its own key, which is made."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    return [
        "munged",
        "--force",
        "--foreground",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/seed",
        f"--log-file={folder}/munged.log",
    ]


def start_daemon(cleanup: contextlib.ExitStack, netns: str, folder: Path, argv: list[str]) -> None:
    inside = ["ip", "netns", "exec", netns, *argv]
    with open(folder / f"{argv[0]}.out", "wb") as log:
        process = subprocess.Popen(inside, stdout=log, stderr=log)
    cleanup.callback(stop, process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.glob("*.out"))


def client(
    environ: dict[str, str], *argv: str, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    command = ["ip", "netns", "exec", environ["NETNS"], *argv]
    return subprocess.run(
        command, env=environ, input=stdin, capture_output=True, text=True, timeout=120
    )


def script(tmp_path: Path, text: str) -> str:
    options = JobOptions(command=("hostname",), time="10")
    return render_sbatch(make_plan(load_cluster(text, tmp_path), options))


def test_five_thousand_nodes_in_three_components(controller: Controller, tmp_path: Path) -> None:
    environ = controller(NODES, "sched/backfill")
    text = script(tmp_path, NODES)
    assert len(text) < 16_384
    done = client(environ, "sbatch", "--test-only", stdin=text)
    assert done.returncode == 0, done.stderr
    nodes = "ampere[0001-2000],titan[0001-1000],volta[0001-2000]"
    assert f"using 104000 processors on {nodes}" in done.stderr
    other = text.replace("titan[0001-1000]", "titan[0002-1001]")
    unknown = client(environ, "sbatch", "--test-only", stdin=other)
    assert unknown.returncode != 0, "the controller does check the names"


def test_refusal_without_backfill_is_passed_on(controller: Controller, tmp_path: Path) -> None:
    environ = controller(TWO_NODES, "sched/builtin")
    done = client(environ, "sbatch", stdin=script(tmp_path, TWO_NODES))
    assert done.returncode != 0
    assert "Requested operation not supported on this system" in done.stderr
