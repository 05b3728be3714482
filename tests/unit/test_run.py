"""``python -m ddp_slurm.run CMD``: env:// variables for any script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.run import script_environ

HET_STEP = {
    "SLURM_JOB_ID": "19007",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_GTIDS": "3,4,5,6",
    "SLURM_STEP_NODELIST": "alpha,beta,gamma",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gamma",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "beta",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "alpha",
}
NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT"


def run(*args: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | env
    command = [sys.executable, "-m", "ddp_slurm.run", *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_command_gets_the_seven_variables() -> None:
    code = f"import os, sys; print(*(os.environ[n] for n in '{NAMES}'.split()), *sys.argv[1:])"
    done = run(sys.executable, "-c", code, "a b", env=HET_STEP)
    assert (done.returncode, done.stdout) == (0, "5 2 7 4 2 gamma 10007 a b\n"), done.stderr


def test_script_needs_no_interpreter_and_may_follow_a_dash(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:])")
    for args in ([str(script)], ["--", str(script)]):
        assert run(*args, "--x", env=HET_STEP).stdout == f"{sys.executable} --x\n"


def test_help_is_printed() -> None:
    for option in ("-h", "--help"):
        done = run(option, env={})
        assert (done.returncode, done.stderr) == (0, "")
        assert "usage: python -m ddp_slurm.run [--uneven] CMD ..." in done.stdout


def test_script_gets_all_that_torchrun_sets() -> None:
    step = {**HET_STEP, "SLURM_STEP_TASKS_PER_NODE": "4,2,1", "SLURM_RESTART_COUNT": "2"}
    env = script_environ(step)
    expected = {
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "7",
        "TORCHELASTIC_RUN_ID": "19007",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert expected.items() <= env.items()
    planned = script_environ({**step, "DDP_SLURM_TASKS_PER_NODE": "1,2(x2)"})
    assert planned["GROUP_WORLD_SIZE"] == "3"
    assert "GROUP_WORLD_SIZE" not in script_environ(HET_STEP)


def test_script_gets_no_variable_that_is_not_known() -> None:
    four = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2345"}
    env = script_environ(four)
    assert four.items() <= env.items()
    assert not env.keys() & {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}


@pytest.mark.parametrize("has_gpu", [True, False])
def test_script_gets_the_marks_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_gpu: bool
) -> None:
    device = tmp_path / "nvidia0"
    if has_gpu:
        device.touch()
    monkeypatch.setattr(
        "ddp_slurm.run.ACCELERATORS", (str(tmp_path / "kfd"), str(tmp_path / "nvidia[0-9]*"))
    )
    env = script_environ({**HET_STEP, "OTHER": "x"})
    assert (env["GROUP_RANK"], env["TORCHELASTIC_RUN_ID"], env["OTHER"]) == ("2", "19007", "x")
    assert env.get("ACCELERATE_USE_CPU") == (None if has_gpu else "true")
    own = {"TORCHELASTIC_RUN_ID": "mine", "ACCELERATE_USE_CPU": "false"}
    assert own.items() <= script_environ({**HET_STEP, **own}).items()
    again = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
    assert (
        script_environ({k: v for k, v in again.items() if k != "TORCHELASTIC_RUN_ID"})[
            "TORCHELASTIC_RUN_ID"
        ]
        == "ddp_slurm"
    )


def test_exit_status_is_the_commands() -> None:
    assert run(sys.executable, "-c", "raise SystemExit(7)", env=HET_STEP).returncode == 7


@pytest.mark.parametrize(
    ("args", "env", "status", "words"),
    [
        ([], HET_STEP, 2, "no command"),
        (["no-such-program"], HET_STEP, 127, "no-such-program: No such file or directory"),
        (["/etc/passwd"], HET_STEP, 126, "/etc/passwd: Permission denied"),
        (["true"], {}, 2, "no launcher"),
        (["true"], {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0"}, 2, "not inside an srun step"),
        (
            ["true"],
            {**HET_STEP, "WORLD_SIZE": "7"},
            2,
            "incomplete variables of a launcher: WORLD_SIZE set",
        ),
    ],
)
def test_command_that_cannot_run_is_an_error(
    args: list[str], env: dict[str, str], status: int, words: str
) -> None:
    done = run(*args, env=env)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_run_imports_the_standard_library_only() -> None:
    code = (
        "import sys, ddp_slurm.run; "
        "print(sorted({'jinja2', 'torch', 'yaml'} & {m.split('.')[0] for m in sys.modules}))"
    )
    assert subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ).stdout in ("[]\n",)
