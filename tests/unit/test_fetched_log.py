"""The log of a job whose rank 0 is on a host with which this one shares no folder."""

import socket
from pathlib import Path

import pytest

from ddp_slurm.runs.fetched_log import FetchedLog, host_elsewhere
from ddp_slurm.runs.run_folder import Run
from ddp_slurm.slurm_client.states import ComponentState, JobState
from tests.unit.conftest import Stub


def read(log: FetchedLog, *, ended: bool = False) -> str:
    log.fetch_now()
    return "".join(log.new_text(ended=ended))


@pytest.fixture
def far(tmp_path: Path, stub: Stub) -> Path:
    """The file that gamma has as /far/it's a log, by an ssh that runs the command here."""
    (tmp_path / "far").mkdir()
    stub(
        "ssh",
        f'[[ "${{*: -2:1}}" == gamma ]] || exit 9; cd {tmp_path}; bash -c "${{!#//\\/far/far}}"',
    )
    return tmp_path / "far" / "it's a log"


def test_fetched_log_grows_without_a_byte_lost_or_twice(far: Path) -> None:
    log = FetchedLog(Path("/far/it's a log"), "gamma")
    assert read(log) == ""
    assert "No such file" in log.problem
    missing = FetchedLog(Path("/far/away/log"), "gamma")
    assert read(missing) == ""
    assert "gamma does not have the folder /far/away, so Slurm" in missing.problem
    far.write_bytes("0: läuft\n0: hal".encode()[:-1])
    assert read(log) == "0: läuft\n"
    assert log.problem == ""
    with far.open("ab") as file:
        file.write("alb ü".encode())
    assert read(log) == ""
    assert read(log, ended=True) == "0: haalb ü\n"


def test_fetched_log_prefers_the_file_here(far: Path, tmp_path: Path) -> None:
    here = tmp_path / "shared.out"
    log = FetchedLog(here, "gamma")
    assert (read(log), bool(log.problem)) == ("", True)
    here.write_text("0: a\n")
    assert (read(log), log.problem) == ("0: a\n", "")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gamma[1-2]", "gamma1"), (socket.gethostname(), None), ("", None)],
)
def test_host_of_the_job_script(nodes: str, host: str | None) -> None:
    state = JobState("4", "RUNNING", "scontrol", (ComponentState("4", "RUNNING", nodes),))
    assert host_elsewhere(state, None) == host


@pytest.mark.parametrize(("word", "host"), [("PENDING", None), ("ENDED", "gamma")])
def test_host_of_a_job_without_nodes_is_that_of_the_plan_once_it_ran(
    tmp_path: Path, word: str, host: str | None
) -> None:
    (tmp_path / "plan.json").write_text(
        '{"world_size": 1, "launcher": "srun", "ranks": [{"node": "gamma"}]}'
    )
    run = Run(tmp_path, "4", "sbatch", str(tmp_path), None, "", ("true",), ())
    state = JobState("4", word, "squeue", (ComponentState("4", word, ""),))
    assert host_elsewhere(state, run) == host


def test_fetched_log_reports_a_host_that_lets_nobody_in(stub: Stub, tmp_path: Path) -> None:
    stub("ssh", "echo 'gamma: Permission denied (publickey)' >&2; exit 255")
    log = FetchedLog(tmp_path / "x", "gamma")
    assert (read(log), "Permission denied" in log.problem) == ("", True)
