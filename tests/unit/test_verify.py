"""``ddp-slurm verify``: what it refuses."""

import pytest

from ddp_slurm.job_env import JobEnv, JobEnvError, Verify
from ddp_slurm.verify import VerifyError, verify


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": []}, "verify -- python train.py"),
        ({"steps": 0}, "--steps of 1 or more"),
        ({"shares": "4"}, "expected two ranks or more"),
        ({"shares": "1,x"}, "--shares '1,x'"),
    ],
)
def test_verify_refuses_what_it_cannot_compare(options: dict[str, object], words: str) -> None:
    given = {"shares": "1,2", "steps": 1, "command": ["--", "train.py"], **options}
    with pytest.raises(VerifyError) as raised:
        verify(**given)  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_verify_reaches_the_ranks() -> None:
    asked = Verify(3, 7, "/tmp/a:b")
    environ = JobEnv(verify=asked).to_environ()
    assert environ == {"DDP_SLURM_VERIFY": "3:7:/tmp/a:b"}
    assert JobEnv.from_environ(environ).verify == asked
    with pytest.raises(JobEnvError, match="STEPS:RANKS:FILE"):
        JobEnv.from_environ({"DDP_SLURM_VERIFY": "3:x"})
