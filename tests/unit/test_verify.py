"""``ddp-slurm verify``: what it refuses, and what its ranks are started with."""

import pytest

from ddp_slurm import verify as verify_command
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


@pytest.mark.parametrize(
    ("gpus", "shares", "expected", "says"),
    [
        (("0", "1", "2", "3"), (1, 2, 4), ["0", "1,2", "1,2"], ""),
        (("4", "6"), (1, 3), ["4", "6"], ""),
        (("0",), (1, 2, 4), ["", "", ""], "has 1 GPUs for 3 ranks"),
        ((), (1, 2), ["", ""], ""),
        (("0", "1", "2"), (7,), ["0"], ""),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: tuple[str, ...],
    shares: tuple[int, ...],
    expected: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(verify_command, "visible_gpus", lambda: gpus)
    ranks = max(len(shares), 2)
    asked = Verify(1, ranks, "x")
    environs = list(verify_command._environs(shares, asked, verify_command._devices(ranks)))
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environs] == expected
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "0", "1"][: len(shares)]
    assert says in capsys.readouterr().err
