"""A script for thousands of nodes before a live slurmctld that knows them, and before one that has no backfill.

No slurmd runs: the nodes are cloud nodes that nobody resumes. That is enough for ``sbatch --test-only``, which plans
the job as if it were submitted.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch

NODES = "nodes:\n" + "".join(
    f"  - {{name: '{name}[0001-{count:04}]', gpus: {{type: {name}, count: {gpus}}}, cpus: {8 * gpus}, memory: {60 * gpus}G}}\n"
    for name, gpus, count in (("titan", 1, 1000), ("volta", 2, 2000), ("ampere", 4, 2000))
)

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
_numbers = itertools.count()
Controller = Callable[[str, str], dict[str, str]]


@pytest.fixture
def controller(needs_lab: None, tmp_path: Path) -> Iterator[Controller]:
    """``controller(cluster_yaml, scheduler)``: a slurmctld on the loopback of a namespace of its own.

    Gives what to run clients with: the prefix of their command line and their environment's SLURM_CONF.
    """
    with contextlib.ExitStack() as cleanup:

        def start(text: str, scheduler: str) -> dict[str, str]:
            netns = f"ddpscale{os.getpid()}-{next(_numbers)}"
            folder = tmp_path / netns
            (folder / "state").mkdir(parents=True)
            subprocess.run(["ip", "netns", "add", netns], check=True)
            cleanup.callback(subprocess.run, ["ip", "netns", "delete", netns], check=True)
            # slurmctld looks for an address that is not the loopback's before it listens
            for command in (
                "link set lo up",
                "link add here type bridge",
                "address add 198.18.255.1/32 dev here",
                "link set here up",
            ):
                subprocess.run(["ip", "-n", netns, *command.split()], check=True)
            (folder / "cluster.yaml").write_text(text)
            lines = [
                f"NodeName={entry.nodelist} CPUs={entry.cpus_per_task * entry.tasks_per_node} RealMemory={entry.memory_mb}"
                f" Gres={entry.gres} State=CLOUD NodeAddr=127.0.0.1"
                for entry in make_plan(
                    Cluster.load(folder / "cluster.yaml"), JobOptions()
                ).components
            ]
            conf = folder / "slurm.conf"
            conf.write_text(
                SLURM_CONF.format(folder=folder, scheduler=scheduler, nodes="\n".join(lines))
            )
            (folder / "gres.conf").write_text("")
            key = folder / "munge.key"
            key.write_bytes(os.urandom(1024))
            key.chmod(0o400)
            munged = [
                "munged",
                "--force",
                "--foreground",
                f"--key-file={key}",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munged.pid",
                f"--seed-file={folder}/seed",
                f"--log-file={folder}/munged.log",
            ]
            for daemon in (munged, ["slurmctld", "-D", "-f", str(conf)]):
                log = cleanup.enter_context(open(folder / f"{daemon[0]}.out", "wb"))
                process = subprocess.Popen(
                    ["ip", "netns", "exec", netns, *daemon], stdout=log, stderr=log
                )
                cleanup.callback(stop, process)
                wait_for((folder / "munge.socket").is_socket, folder)
            environ = {**os.environ, "SLURM_CONF": str(conf), "NETNS": netns}
            wait_for(lambda: client(environ, "scontrol", "ping").returncode == 0, folder)
            return environ

        yield start


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        logs = "".join(path.read_text(errors="replace") for path in folder.glob("*.out"))
        assert time.monotonic() < give_up, logs
        time.sleep(0.05)


def client(
    environ: dict[str, str], *argv: str, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    command = ["ip", "netns", "exec", environ["NETNS"], *argv]
    return subprocess.run(
        command, env=environ, input=stdin, capture_output=True, text=True, timeout=120
    )


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "cluster.yaml").write_text(text)
    return render_sbatch(
        make_plan(
            Cluster.load(tmp_path / "cluster.yaml"), JobOptions(command=("hostname",), time="10")
        )
    )


def test_five_thousand_nodes_in_three_components(controller: Controller, tmp_path: Path) -> None:
    environ = controller(NODES, "sched/backfill")
    text = script(tmp_path, NODES)
    assert len(text) < 16_384
    done = client(environ, "sbatch", "--test-only", stdin=text)
    assert done.returncode == 0, done.stderr
    assert (
        "using 104000 processors on ampere[0001-2000],titan[0001-1000],volta[0001-2000]"
        in done.stderr
    )
    unknown = client(
        environ, "sbatch", "--test-only", stdin=text.replace("titan[0001-1000]", "titan[0002-1001]")
    )
    assert unknown.returncode != 0, "the controller does look at the names"


def test_without_backfill_slurms_refusal_is_passed_on(
    controller: Controller, tmp_path: Path
) -> None:
    nodes = "nodes:\n  - {name: a, gpus: 1, cpus: 8, memory: 4G}\n  - {name: b, gpus: 2, cpus: 8, memory: 4G}\n"
    environ = controller(nodes, "sched/builtin")
    done = client(environ, "sbatch", stdin=script(tmp_path, nodes))
    assert done.returncode != 0
    assert "Requested operation not supported on this system" in done.stderr
