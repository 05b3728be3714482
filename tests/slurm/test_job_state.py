"""status, logs, cancel and --follow on live Slurm without accounting."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_slurm.lab import Lab

from ..processes import running
from .conftest import LIVE_CLUSTER

pytestmark = pytest.mark.timeout(600)
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environ(live_lab: Lab, clean_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    (tmp_path / "cluster.yaml").write_text(LIVE_CLUSTER)
    return {**clean_environ, **live_lab.environ}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "ddp_slurm.cli", *args]


@pytest.fixture
def cli(environ: dict[str, str], tmp_path: Path) -> Iterator[Cli]:
    """Runs ``ddp-slurm ARGS`` beside the lab's cluster.yaml; its jobs are cancelled in the end."""
    submitted: list[str] = []

    def run(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            command(*args), cwd=tmp_path, env={**environ, **env}, capture_output=True, text=True
        )
        if args[0] == "submit":
            submitted.append(done.stdout.strip())
        return done

    yield run
    for job_id in submitted:
        subprocess.run(["scancel", job_id], env=environ, capture_output=True)


def status(cli: Cli, job_id: str, **env: str) -> dict[str, Any]:
    done = cli("status", job_id, "--json", **env)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def wait_for(cli: Cli, job_id: str, *states: str) -> dict[str, Any]:
    while True:
        found = status(cli, job_id)
        if found["state"] in states:
            return found
        assert found["state"] in ("PENDING", "RUNNING", "COMPLETING"), found
        time.sleep(0.1)


FAIL = "echo rank $SLURM_PROCID; exit $((SLURM_PROCID == 4 ? 3 : 0))"


def test_failed_job_is_followed_reported_and_kept(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "submit", "--time", "5", "--output", "logs/%x-%j.out", "--follow", "--", "bash", "-c", FAIL
    )
    job_id = done.stdout.strip()
    assert (done.returncode, done.stdout) == (3, f"{job_id}\n")
    assert f"job {job_id} is FAILED (exit status 3, NonZeroExitCode)" in done.stderr
    assert "4: rank 4\n" in done.stderr
    reported = status(cli, job_id)
    assert [
        (c["job_id"], c["state"], c["nodes"], c["exit_status"], c["restarts"])
        for c in reported["components"]
    ] == [
        (f"{job_id}+0", "FAILED", "gamma", 3, 0),
        (f"{job_id}+1", "FAILED", "beta", 3, 0),
        (f"{job_id}+2", "FAILED", "alpha", 3, 0),
    ]
    assert reported["log"] == str(tmp_path / f"logs/lab-{job_id}.out")
    assert cli("logs", job_id, "--rank", "5").stdout == "5: rank 5\n"
    folder = tmp_path / "logs/ddp_slurm_runs" / job_id
    assert (folder / "exit").read_text().startswith("status=3\nterminated=no\n")
    # a month later: this Slurm is gone
    gone = {"PATH": str(tmp_path)}
    assert (status(cli, job_id, **gone)["state"], status(cli, job_id, **gone)["source"]) == (
        "FAILED",
        "last look",
    )
    (folder / "state.json").unlink()
    assert (status(cli, job_id, **gone)["state"], status(cli, job_id, **gone)["source"]) == (
        "FAILED",
        "exit marker",
    )


def test_waiting_job_is_shown_and_cancelled(cli: Cli, tmp_path: Path) -> None:
    first = cli("submit", "--time", "5", "--", "sleep", "600").stdout.strip()
    wait_for(cli, first, "RUNNING")
    second = cli("submit", "--time", "5", "--", "true").stdout.strip()
    while "Resources" not in (text := cli("status", second).stdout):
        assert f"{second}+2  PENDING" in text
        time.sleep(0.1)
    refused = cli("logs", second)
    assert refused.returncode == 2
    assert f"no such file; job {second} has not begun: PENDING (" in refused.stderr
    assert cli("cancel", second).returncode == cli("cancel", f"{first}+1").returncode == 0
    for job_id in (first, second):
        found = wait_for(cli, job_id, "CANCELLED")
        assert [c["state"] for c in found["components"]] == ["CANCELLED"] * 3
    assert "terminated=yes" in (tmp_path / "ddp_slurm_runs" / first / "exit").read_text()


def test_ctrl_c_detaches_and_the_job_goes_on(
    cli: Cli, environ: dict[str, str], tmp_path: Path
) -> None:
    words = command(
        "submit", "--time", "5", "--gpus", "1", "--follow", "--", "bash", "-c", "echo up; sleep 600"
    )
    with running(words, cwd=tmp_path, env=environ, stderr=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        job_id = follower.stdout.readline().strip()
        lines = iter(follower.stderr.readline, "")
        assert any(line == "0: up\n" for line in lines)
        follower.send_signal(signal.SIGINT)
        rest = follower.stderr.read()
        assert follower.wait() == 130
    assert f"detached; job {job_id} goes on. Come back: ddp-slurm logs {job_id} --follow" in rest
    assert status(cli, job_id)["state"] == "RUNNING"
    cli("cancel", job_id)
    back = cli("logs", job_id, "--follow")
    assert back.returncode != 0
    assert f"job {job_id} is CANCELLED" in back.stderr


REQUEUE = """
if [[ ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
  [[ $SLURM_PROCID != 0 ]] || touch "$DDP_SLURM_REQUEUE_MARKER"
  exit 0
fi
echo continues
"""


def test_requeued_job_has_not_ended(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rank.sh").write_text(REQUEUE)
    words = [
        "--signal-seconds",
        "60",
        "--max-restarts",
        "1",
        "--gpus",
        "3",
        "--",
        "bash",
        "rank.sh",
    ]
    job_id = cli("submit", "--time", "5", *words).stdout.strip()
    while status(cli, job_id)["components"][0]["restarts"] != 1:
        time.sleep(0.1)
    waiting = status(cli, job_id)
    assert waiting["state"] in ("PENDING", "COMPLETING", "RUNNING")
    assert (
        waiting["state"] != "PENDING"
        or not (tmp_path / "ddp_slurm_runs" / job_id / "exit").exists()
    )
    ended = wait_for(cli, job_id, "COMPLETED")
    assert {c["restarts"] for c in ended["components"]} == {1}
    assert "restarts=1" in (tmp_path / "ddp_slurm_runs" / job_id / "exit").read_text()
    assert "2: continues\n" in cli("logs", job_id).stdout
