"""The job script: its text, and what it does with stubs for Slurm's clients."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ddp_slurm.cluster import Cluster, GpuModel
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job.options import JobOptions, SbatchOption
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render import render_sbatch
from ddp_slurm.render.quoting import directive
from ddp_slurm.render.templating import render_template

from .conftest import Stub

GOLDEN = Path(__file__).parent / "golden"

HOMOGENEOUS = """\
name: even
nodes:
  - {name: 'n[1-3]', gpus: 2, cpus: 8, partition: big, constraint: volta&nvlink}
"""
TWO_NODES = """\
name: mixed
nodes:
  - {name: z1, gpus: {type: titan, count: 1}, interface: eno1, env: {NCCL_DEBUG: INFO}}
  - {name: 'a[1-2]', gpus: {type: a100, count: 4}, interface: ens3, partition: big}
"""
FULL = {
    "name": 'a job\'s "name" #1',
    "time": "1-12:00:00",
    "output": "logs/it's %x-%j.out",
    "account": "lab",
    "qos": "high",
    "signal_seconds": 120,
    "max_restarts": 3,
    "env": ["GREETING=it's $HOME", "EMPTY="],
    "setup": ["module load cuda"],
    "conda_env": "torch env",
    "global_batch_size": 256,
    "balance": "measured",
    "sbatch": ["reservation=lab", "1:mincpus=4", "exclusive", "comment=two words #1"],
}
NODEWISE = {
    "launcher": "torchrun",
    "container": "apptainer:/images/a b.sif",
    "mount": ["/data:/data:ro"],
    "time": "10",
    "signal_seconds": 60,
    "max_restarts": 2,
    "python": "/opt/my env/bin/python",
}


def plan_of(tmp_path: Path, cluster: str, **options: Any) -> Plan:
    path = tmp_path / "golden.yaml"
    path.write_text(cluster)
    return make_plan(
        Cluster.load(path), JobOptions(**{"command": ["python", "train.py", "5", "1"], **options})
    )


CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "uneven": (None, {}),
    "homogeneous": (HOMOGENEOUS, {"venv": "/opt/my env"}),
    "two_node_component": (TWO_NODES, {"time": "10"}),
    "full": (None, FULL),
    "torchrun": (None, NODEWISE),
}


def rendered(case: str, uneven: Path, tmp_path: Path) -> str:
    cluster, options = CASES[case]
    return render_sbatch(plan_of(tmp_path, cluster or uneven.read_text(), **options))


@pytest.mark.parametrize("case", CASES)
def test_script_equals_its_golden_file(case: str, uneven: Path, tmp_path: Path) -> None:
    """To update them on purpose: run with DDP_SLURM_UPDATE_GOLDEN=1 and read the difference."""
    text, golden = rendered(case, uneven, tmp_path), GOLDEN / f"{case}.sbatch"
    if os.environ.get("DDP_SLURM_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("case", CASES)
def test_script_passes_bash_and_shellcheck(case: str, uneven: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(rendered(case, uneven, tmp_path))
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run_script(text: str, tmp_path: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "job.sh"
    script.write_text(text)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    environ |= {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3", **env}
    return subprocess.run(["bash", script], env=environ, capture_output=True, text=True, timeout=30)


RECORD = 'printf "%s\\0" "$@" > "$RECORD"; env -0 > "$RECORD.env"; exit "${SRUN_STATUS:-0}"'


def test_srun_gets_every_segment_without_the_batch_shells_sizes(
    uneven: Path, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    hostile = ["$(id)", "it's", 'say "x"', "a b", "*", "", "-x", "ü"]
    text = render_sbatch(
        plan_of(tmp_path, uneven.read_text(), command=["python", *hostile], env=["V=a 'b' $HOME"])
    )
    sizes = dict.fromkeys(
        ("SLURM_NTASKS", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_MEM_PER_NODE"), "9"
    )
    done = run_script(text, tmp_path, RECORD=str(tmp_path / "argv"), **sizes)
    assert done.returncode == 0, done.stderr
    argv = (tmp_path / "argv").read_text().split("\0")[:-1]
    assert argv[:2] == ["--label", "--kill-on-bad-exit=1"]
    segments = " ".join(argv[2:]).split(" : ")
    assert [segment.split(" python ")[0] for segment in segments] == [
        "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8",
        "--nodes=1 --ntasks=2 --ntasks-per-node=2 --cpus-per-task=8",
        "--nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=8",
    ]
    assert argv[-len(hostile) :] == hostile
    env = dict(
        item.partition("=")[::2] for item in (tmp_path / "argv.env").read_text().split("\0") if item
    )
    assert not set(sizes) & set(env)
    assert env["V"] == "a 'b' $HOME"
    assert env["DDP_SLURM_TASKS_PER_NODE"] == "1,2,4"
    assert "CUDA_VISIBLE_DEVICES" not in text


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_env_of_any_name_reaches_the_ranks(
    launcher: str, uneven: Path, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", RECORD)
    names = ["run_folder", "terminated", "scratch", "status", "launch", "command", "attempt"]
    options = {"launcher": launcher, "time": "10", "signal_seconds": 60, "max_restarts": 1}
    plan = plan_of(tmp_path, uneven.read_text(), env=[f"{name}=mine" for name in names], **options)
    job = {"RECORD": str(tmp_path / "argv"), "SLURMD_NODENAME": "gamma"}
    done = run_script(render_sbatch(plan, tmp_path / "runs"), tmp_path, **job)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "argv").read_text().split("\0")[-5:-1] == ["python", "train.py", "5", "1"]
    env = (tmp_path / "argv.env").read_text().split("\0")
    assert {f"{name}=mine" for name in names} <= set(env)
    assert (tmp_path / "runs/7/exit").read_text().startswith("status=0\nterminated=no\n")


@pytest.mark.parametrize("status", [0, 1, 3, 137])
def test_script_exits_with_the_status_of_srun(
    status: int, uneven: Path, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", f"exit {status}")
    assert run_script(rendered("uneven", uneven, tmp_path), tmp_path).returncode == status


def test_stop_at_the_time_limit_requeues_up_to_max_restarts(
    uneven: Path, tmp_path: Path, stub: Stub
) -> None:
    stub("srun", 'touch "$DDP_SLURM_REQUEUE_MARKER"')
    stub("scontrol", f'echo "$@" >> {tmp_path}/scontrol')
    options = {"time": "10", "signal_seconds": 60, "max_restarts": 1}
    text = render_sbatch(plan_of(tmp_path, uneven.read_text(), **options))
    assert run_script(text, tmp_path).returncode == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    done = run_script(text, tmp_path, SLURM_RESTART_COUNT="1")
    assert done.returncode == 75, "training is not finished: the job must not read COMPLETED"
    assert "all 1 restarts are used up" in done.stderr
    assert run_script(text, tmp_path, SLURM_RESTART_COUNT="2").returncode == 75
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    done = run_script(
        render_sbatch(plan_of(tmp_path, uneven.read_text(), **options | {"max_restarts": 0})),
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert "submit again to go on" in done.stderr
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


def test_script_refuses_to_run_outside_its_job(uneven: Path, tmp_path: Path, stub: Stub) -> None:
    stub("srun", "echo started")
    text = rendered("uneven", uneven, tmp_path)
    for env, words in (
        ({"SLURM_JOB_ID": ""}, "start it with: sbatch"),
        ({"SLURM_HET_SIZE": "1"}, "expected 3 components, got 1"),
    ):
        done = run_script(text, tmp_path, **env)
        assert done.returncode == 2
        assert words in done.stderr
        assert "started" not in done.stdout


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        (None, {"command": []}, "no command"),
        (None, {"command": ["a", ":", "b"]}, "the word ':'"),
        (None, {"sbatch": ["3:x=1"]}, "there are only components 0 to 2"),
        (
            "nodes:\n  - {name: a, gpus: 1, memory: 3G}\n  - {name: b, gpus: 2}\n",
            {},
            "memory is given for some nodes but not for b",
        ),
        (
            "nodes:\n"
            + "".join(f"  - {{name: n{i}, gpus: 1, cpus: {i}}}\n" for i in range(1, 130)),
            {},
            "129 components, Slurm accepts at most 128",
        ),
    ],
)
def test_render_refuses_what_slurm_would_misread(
    uneven: Path, tmp_path: Path, cluster: str | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DdpSlurmError) as caught:
        render_sbatch(plan_of(tmp_path, cluster or uneven.read_text(), **options))
    assert words in str(caught.value)


def test_render_accepts_128_components(tmp_path: Path) -> None:
    nodes = "".join(f"  - {{name: n{i}, gpus: 1, cpus: {i}}}\n" for i in range(1, 129))
    assert render_sbatch(plan_of(tmp_path, f"nodes:\n{nodes}")).count("#SBATCH hetjob\n") == 127


@pytest.mark.parametrize(
    "field",
    [
        "nodes",
        "gpus",
        "partition",
        "constraint",
        "name",
        "output",
        "time",
        "account",
        "qos",
        "sbatch",
    ],
)
def test_no_value_can_start_a_directive(uneven: Path, tmp_path: Path, field: str) -> None:
    bad: Any = "a\n#SBATCH --uid=0"
    bad = {
        "nodes": (bad,),
        "gpus": (GpuModel(count=1).replaced(type=bad),),
        "sbatch": (SbatchOption(None, "x", bad),),
    }.get(field, bad)
    plan = plan_of(tmp_path, uneven.read_text())
    if field in ("nodes", "gpus", "partition", "constraint"):
        plan = replace(
            plan, components=(replace(plan.components[0], **{field: bad}), *plan.components[1:])
        )
    else:
        plan = replace(plan, options=plan.options.replaced(**{field: bad}))
    with pytest.raises(DdpSlurmError, match="newline"):
        render_sbatch(plan)


def test_template_with_a_missing_value_fails() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'release' is undefined"):
        render_template("slurmdbd.conf.j2")


def test_directive_quotes_as_sbatch_reads() -> None:
    assert directive("a-b_c/%x.out") == "a-b_c/%x.out"
    assert directive('it\'s "x" \\ #1') == '"it\'s \\"x\\" \\\\ #1"'
    with pytest.raises(DdpSlurmError, match="newline"):
        directive("a\n#SBATCH --uid=0")
