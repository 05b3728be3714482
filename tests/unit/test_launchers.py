"""The command of a rank: launchers are refused, Python programs get uneven shares."""

import sys
from pathlib import Path

import pytest

from ddp_slurm.job.checks import combination_errors
from ddp_slurm.job.options import JobOptions
from ddp_slurm.launchers import CommandError, forgotten_run, launcher_in, uneven_command
from ddp_slurm.run import rank_command

SCRIPTS = "ddp_slurm.training.scripts"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nproc-per-node 4 train.py", "torchrun"),
        ("/opt/bin/torchrun train.py", "torchrun"),
        ("accelerate launch train.py", "accelerate launch"),
        ("python3 -u -m torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("python -X dev -m torch.distributed.launch a.py", "python -m torch.distributed.launch"),
        ("deepspeed train.py", "deepspeed"),
        ("torchrun --nnodes=3 --node-rank=1 train.py", None),
        ("accelerate config", None),
        ("python torchrun.py", None),
        ("python -m train torchrun", None),
    ],
)
def test_launcher_is_found_in_a_command(command: str, launcher: str | None) -> None:
    assert launcher_in(command.split()) == launcher
    options = JobOptions(command=command.split())
    errors = combination_errors(options)
    assert bool(errors) is (launcher is not None)
    assert not errors or "python -m ddp_slurm.run train.py" in errors[0]


def test_run_refuses_a_launcher_for_several_ranks_only() -> None:
    command = ["torchrun", "train.py"]
    assert rank_command(command, is_uneven=False, world_size=1) == command
    with pytest.raises(CommandError, match="a world of its own on every rank"):
        rank_command(command, is_uneven=False, world_size=7)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train.py --lr 1", f"{sys.executable} -m {SCRIPTS} train.py --lr 1"),
        ("python -u train.py a", f"{sys.executable} -u -m {SCRIPTS} train.py a"),
        ("python3 -m pkg.train -m x", f"{sys.executable} -m {SCRIPTS} -m pkg.train -m x"),
        ("/opt/python3.12 -W ignore t.py", f"/opt/python3.12 -W ignore -m {SCRIPTS} t.py"),
    ],
)
def test_uneven_command_is_started_by_its_python(command: str, expected: str) -> None:
    assert uneven_command(command.split()) == expected.split()


def test_uneven_command_may_be_a_console_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, first_line in (("mine", "#!/opt/venv/bin/python3.11"), ("shell", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{first_line}\n")
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path / "mine")
    expected = ["/opt/venv/bin/python3.11", "-m", SCRIPTS, path, "fit"]
    assert uneven_command(["mine", "fit"]) == expected
    for command in (["shell"], ["missing"], ["python"]):
        with pytest.raises(CommandError, match="starts the Python program itself"):
            uneven_command(command)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py", "python -m ddp_slurm.run --uneven python train.py"),
        ("train.py", "python3 -m ddp_slurm.run --uneven train.py"),
        ("python -m ddp_slurm.run train.py", "python -m ddp_slurm.run --uneven train.py"),
    ],
)
def test_uneven_job_runs_its_command_through_run(command: str, expected: str) -> None:
    options = JobOptions(command=command.split(), uneven="true")
    assert list(options.task_command) == expected.split()
    assert list(JobOptions(command=command.split(), uneven="false").task_command) != expected


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"comm": "bf16"}, "world.wrap"),
        ({"balance": "measured"}, "--balance speeds.yaml"),
        ({"balance": "adaptive"}, "--balance adaptive cannot be combined with --uneven"),
    ],
)
def test_uneven_job_refuses_what_it_cannot_have(other: dict[str, str], words: str) -> None:
    (error,) = combination_errors(JobOptions(command=["a.py"], uneven="true", **other))
    assert words in error


@pytest.mark.parametrize(
    ("text", "before", "is_forgotten"),
    [
        ("from accelerate import Accelerator\naccelerator = Accelerator()", "python", True),
        ("torch.distributed.init_process_group('nccl')", "python -u", True),
        ("trainer = L.Trainer(strategy='ddp')", "", True),
        ("trainer = L.Trainer(strategy='ddp')", "python -m ddp_slurm.run", False),
        ("from ddp_slurm.training import Trainer\nTrainer(model)", "python", False),
        ("rank = os.environ['SLURM_PROCID']; init_process_group()", "python", False),
        ("print(1)", "python", False),
    ],
)
def test_script_that_needs_run_gets_a_line(
    tmp_path: Path, text: str, before: str, is_forgotten: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    line = forgotten_run([*before.split(), str(script), "--lr", "1"])
    assert (line is not None) is is_forgotten
    assert line is None or f"python -m ddp_slurm.run {script}" in line
    assert forgotten_run(["python", str(tmp_path / "missing.py")]) is None
