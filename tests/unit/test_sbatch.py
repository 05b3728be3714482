"""What sbatch reports of a submission: the id, a refusal, or nothing that is certain."""

import time
from pathlib import Path

import pytest

from ddp_slurm.backends import sbatch
from ddp_slurm.backends.sbatch import SubmitError, submit

from .conftest import Stub

SCRIPT = "#!/bin/bash\ntrue\n"
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(sbatch, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(sbatch, "LOOK_AGAIN_SECONDS", 0.01)


@pytest.fixture
def queue(stub: Stub, tmp_path: Path) -> Path:
    """A folder of scripts by job id, which the stubs of squeue and scontrol show."""
    folder = tmp_path / "queue"
    folder.mkdir()
    stub("squeue", f"ls {folder} | sed 's/$/+0/'; ls {folder} | sed 's/$/+1/'")
    stub("scontrol", f'[[ "$1 $2 $4" == "write batch_script -" ]] && cat "{folder}/$3"')
    return folder


@pytest.mark.parametrize(
    "prints",
    [
        "echo 48",
        "echo '48;cluster'",
        "echo 'Submitted batch job 48'",
        "echo 'Submitted batch job 48 on cluster slaking'",
        "echo 'Welcome to Stampede3'; echo '--> Verifying 2 things...OK'; echo 48",
        "echo 48; echo 'Your balance: 497,218.77 hours'",
        "echo 12; echo 'Submitted batch job 48'",
        "echo 'sbatch: no partition specified' >&2; echo 48",
    ],
)
def test_the_id_is_found_among_a_sites_lines(stub: Stub, prints: str) -> None:
    stub("sbatch", f"cat >/dev/null; {prints}")
    assert submit(SCRIPT) == "48"


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'Your job was queued'",
        "echo 12; echo 34",
        "",
        f"echo '{TIMED_OUT}' >&2; exit 1",
        "echo 'error: Zero Bytes were transmitted or received' >&2; exit 1",
        "echo 'Unable to contact slurm controller (receive failure)' >&2; exit 1",
        "kill -9 $$",
    ],
)
def test_an_accepted_job_is_found_by_its_script(
    stub: Stub, queue: Path, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ("7", "49", "100"):
        (queue / other).write_text(SCRIPT)
    stub("sbatch", f"cat > {queue}/48; {answer}")
    assert submit(SCRIPT) == "48"
    assert (queue / "48").read_text().startswith(SCRIPT + "# submission ")
    assert "sbatch did not report the job's id" in capsys.readouterr().err


def test_a_job_that_appears_later_is_found(stub: Stub, queue: Path, tmp_path: Path) -> None:
    stub("sbatch", f"cat > {tmp_path}/held; echo '{TIMED_OUT}' >&2; exit 1")
    late = f"[[ -e {tmp_path}/asked ]] || {{ touch {tmp_path}/asked; exit 1; }}"
    stub("squeue", f"{late}; mv {tmp_path}/held {queue}/48; echo 48")
    assert submit(SCRIPT) == "48"


@pytest.mark.parametrize("squeue", ["exit 0", "exit 1"])
def test_an_unclear_submission_is_not_a_refusal(stub: Stub, queue: Path, squeue: str) -> None:
    stub("squeue", squeue)
    stub("sbatch", f"cat >/dev/null; echo '{TIMED_OUT}' >&2; exit 1")
    with pytest.raises(SubmitError, match="the job may have been accepted") as caught:
        submit(SCRIPT)
    assert "Socket timed out" in str(caught.value)
    stub("sbatch", "cat >/dev/null; echo queued")
    with pytest.raises(SubmitError, match="sbatch accepted the job, but did not report its id"):
        submit(SCRIPT)


@pytest.mark.parametrize(
    "reason",
    [
        "Invalid partition name specified",
        "Unable to contact slurm controller (connect failure)",
        "",
    ],
)
@pytest.mark.parametrize("status", [1, 255])
def test_a_refusal_is_reported_at_once(
    stub: Stub, tmp_path: Path, reason: str, status: int
) -> None:
    stub("squeue", f"touch {tmp_path}/asked")
    stub("sbatch", f"cat >/dev/null; echo '{reason}' >&2; exit {status}")
    with pytest.raises(SubmitError, match="sbatch refused the job") as caught:
        submit(SCRIPT)
    assert str(caught.value).endswith(reason or "no reason given")
    assert not (tmp_path / "asked").exists()


def test_a_slurm_that_answers_is_not_asked_for_long(
    stub: Stub, queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "LOOK_SECONDS", 60.0)
    stub("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    began = time.monotonic()
    with pytest.raises(SubmitError, match="may have been accepted"):
        submit("#!/bin/bash\n")
    assert time.monotonic() - began < 30
