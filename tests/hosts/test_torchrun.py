"""torchrun on machines without Slurm, over a real sshd on each."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.lab import network

from ..processes import running
from .conftest import Hosts

MakeHosts = Callable[..., Hosts]
SCRIPTS = Path(__file__).parents[1] / "scripts"
TRAIN = str(Path(__file__).parents[2] / "synthetic_data_example" / "train.py")


def submit(hosts: Hosts, cluster: Path, *words: str) -> list[str]:
    # torchrun leaves a folder for logs behind
    fixed = ["--backend", "torchrun", "--cluster", str(cluster), "--env", f"TMPDIR={hosts.folder}"]
    return [sys.executable, "-m", "ddp_slurm.submit", *fixed, *words]


def test_uneven_machines_train_to_the_end(make_hosts: MakeHosts, tmp_path: Path) -> None:
    gpus = {"alpha": 4, "beta": 2, "gamma": 1}
    hosts = make_hosts(*sorted(gpus))
    command = submit(
        hosts,
        hosts.cluster_yaml(gpus),
        "--global-batch-size",
        "64",
        "--",
        "python",
        TRAIN,
        "1",
        "1",
        "--samples",
        "256",
    )
    done = subprocess.run(command, env=hosts.environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[alpha]" in done.stdout
    assert "finished: step" in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words", [["accelerate_script.py"], ["lightning_script.py", "auto", "2"]], ids=lambda w: w[0]
)
def test_foreign_scripts_make_one_world(
    make_hosts: MakeHosts, tmp_path: Path, words: list[str]
) -> None:
    gpus = {"gamma": 1, "beta": 2}
    hosts = make_hosts(*gpus)
    script = [str(SCRIPTS / words[0]), *words[1:]]
    command = submit(
        hosts, hosts.cluster_yaml(gpus), "--", "python", "-m", "ddp_slurm.run", *script
    )
    done = subprocess.run(command, env=hosts.environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(
        r"RESULT rank=(\d+) world=3 samples=28 weight=([-.\d]+) bias=([-.\d]+)", done.stdout
    )
    assert sorted(int(rank) for rank, _, _ in found) == [0, 1, 2], done.stdout
    assert len({(weight, bias) for _, weight, bias in found}) == 1
    assert float(found[0][1]) == pytest.approx(3, abs=0.05)
    assert float(found[0][2]) == pytest.approx(1, abs=0.05)


STAND_IN = """#!/bin/bash
# A stand-in for Python: says what it was given, then does what the test asks of this machine.
printf '%s\\n' "$HOSTNAME $*"
exec {folder}/do "$HOSTNAME"
"""


@pytest.fixture
def two_hosts(make_hosts: MakeHosts, tmp_path: Path) -> Callable[[str], tuple[Hosts, list[str]]]:
    """``two_hosts(script)``: two machines, and the command that runs the script on both.

    The script gets the machine's name as its argument.
    """

    def make(script: str) -> tuple[Hosts, list[str]]:
        hosts = make_hosts("alpha", "beta")
        for name, text in (
            ("python", STAND_IN.format(folder=tmp_path)),
            ("do", f"#!/bin/bash\n{script}\n"),
        ):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        cluster = hosts.cluster_yaml({"alpha": 1, "beta": 2})
        return hosts, submit(
            hosts, cluster, "--python", str(tmp_path / "python"), "--", "python", "x.py"
        )

    return make


def wait_until_both_run(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while sum("running" in line for line in lines) < 2:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    return lines


def wait_until_nothing_runs(hosts: Hosts) -> None:
    give_up = time.monotonic() + 120
    while left := hosts.processes("alpha") + hosts.processes("beta"):
        assert time.monotonic() < give_up, left
        time.sleep(0.05)


def test_failure_of_one_node_ends_all(
    two_hosts: Callable[[str], tuple[Hosts, list[str]]],
) -> None:
    hosts, command = two_hosts(
        '[ "$1" = beta ] && { echo broken >&2; exit 7; }; (trap "" TERM; sleep 1000)'
    )
    done = subprocess.run(command, env=hosts.environ, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert (
        "[alpha] alpha -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank=0 "
        in done.stdout
    )
    assert (
        "[beta]  beta -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --node-rank=1 "
        in done.stdout
    )
    assert f"--master-addr={hosts.addresses['alpha']} --master-port=" in done.stdout
    assert (
        "[beta]  broken\n[beta]  torchrun on beta exited with 7\nstopping 1 node\n" in done.stderr
    )
    wait_until_nothing_runs(hosts)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_signal_leaves_nothing_running_on_the_machines(
    two_hosts: Callable[[str], tuple[Hosts, list[str]]], number: signal.Signals, status: int
) -> None:
    hosts, command = two_hosts("sleep 1000 & echo running; sleep 1000")
    with running(command, env=hosts.environ) as process:
        wait_until_both_run(process)
        process.send_signal(number)
        assert process.wait() == status
        wait_until_nothing_runs(hosts)


def test_unreachable_machine_ends_the_run(
    two_hosts: Callable[[str], tuple[Hosts, list[str]]],
) -> None:
    hosts, command = two_hosts("sleep 1000")
    hosts.kill("beta")
    (hosts.folder / "bin" / "ssh").write_text(
        (hosts.folder / "bin" / "ssh").read_text().replace("-F", "-oConnectTimeout=1 -F")
    )
    done = subprocess.run(command, env=hosts.environ, capture_output=True, text=True)
    assert done.returncode == 255
    assert f"[beta]  ssh: connect to host {hosts.addresses['beta']} port 22" in done.stderr
    wait_until_nothing_runs(hosts)


def test_restart_leaves_a_lost_machine_out(
    two_hosts: Callable[[str], tuple[Hosts, list[str]]], tmp_path: Path
) -> None:
    hosts, command = two_hosts(
        '[ -e again ] && { echo "second run, $DDP_SLURM_WORLD_SIZE ranks"; exit; }; '
        "echo running; sleep 1000"
    )
    command[command.index("--python") : command.index("--python")] = ["--max-restarts", "1"]
    with running(command, env=hosts.environ, cwd=tmp_path) as process:
        wait_until_both_run(process)
        (tmp_path / "again").touch()
        hosts.kill("beta")
        output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "node beta is lost: beta: cannot be reached by ssh" in output
    assert "restart 1 of 1: 1 rank on 1 node\n" in output
    assert "[alpha] second run, 1 ranks\n" in output


@pytest.mark.timeout(900)
def test_training_goes_on_without_a_machine_that_died(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts("gamma", "beta")
    words = [
        "--max-restarts",
        "1",
        "--global-batch-size",
        "64",
        "--",
        "python",
        TRAIN,
        "40",
        "1",
        "--samples",
        "1024",
    ]
    command = submit(hosts, hosts.cluster_yaml({"gamma": 1, "beta": 2}), *words)
    with running(command, env=hosts.environ, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = []
        while not (tmp_path / "snapshot.pt").exists():  # a line is read at every epoch at least
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        hosts.kill("beta")
        output = "".join(lines) + process.communicate()[0]
    assert process.returncode == 0, output
    assert "restart 1 of 1: 1 rank on 1 node" in output
    assert re.search(r"resumed from \S*snapshot.pt: epoch", output), output
    assert "finished: step 640," in output  # 40 epochs of 1024 / 64 steps, whoever made them


def test_pulled_cable_ends_the_run_on_both_sides(
    two_hosts: Callable[[str], tuple[Hosts, list[str]]],
) -> None:
    hosts, command = two_hosts("echo running; sleep 1000")
    with running(command, env=hosts.environ) as process:
        wait_until_both_run(process)
        network.plug(hosts.switch, int(hosts.addresses["beta"].rpartition(".")[2]), up=False)
        output = process.communicate()[0]
    assert process.returncode == 255, output
    assert "torchrun on beta exited with 255" in output
    wait_until_nothing_runs(hosts)  # beta sees no end of the connection; it misses the dots
