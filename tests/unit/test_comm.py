"""``--comm``, its forms and what reaches the ranks."""

import pytest

from ddp_slurm.comm import EXACT, Comm
from ddp_slurm.job_env import JobEnv, JobEnvError


@pytest.mark.parametrize(
    "text", ["exact", "bf16", "powersgd", "local:1", "local:100000", "auto", "auto:bf16"]
)
def test_comm_is_read_and_written_alike(text: str) -> None:
    assert str(Comm.read(text)) == text
    environ = JobEnv(comm=Comm.read(text)).to_environ()
    assert JobEnv.from_environ(environ).comm == Comm.read(text)


@pytest.mark.parametrize(
    "text", ["", "local", "local:0", "local:100001", "local:-1", "auto:powersgd", "bf16\n", "12"]
)
def test_comm_refuses_other_values(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of exact, bf16, powersgd, local:STEPS"):
        Comm.read(text)


def test_comm_guesses_what_was_meant() -> None:
    with pytest.raises(ValueError, match="did you mean 'powersgd'"):
        Comm.read("powersdg")


def test_comm_knows_what_is_exact() -> None:
    exact = [text for text in ("exact", "auto", "auto:bf16", "local:4") if Comm.read(text).is_exact]
    assert exact == ["exact", "auto"]


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(JobEnvError, match="DDP_SLURM_COMM: 'local:x' is not one of"):
        JobEnv.from_environ({"DDP_SLURM_COMM": "local:x"})
    assert JobEnv.from_environ({}).comm is None
    assert Comm("exact") == EXACT
