"""The local backend: the planned ranks as processes of this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.backends.local import LocalError, step_processes, visible_gpus
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan

from .conftest import Command, Stub

REPORT = """
import json, os, sys
from dataclasses import asdict
from ddp_slurm.rank_env import RankEnv
print(json.dumps({**asdict(RankEnv.from_environ()), "node": os.environ["SLURMD_NODENAME"],
                  "nodes_of_component": os.environ["SLURM_JOB_NUM_NODES"],
                  "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                  "argv": sys.argv[1:], "a": os.environ.get("A"),
                  "token": os.environ["DDP_SLURM_TOKEN"]}))
"""


def reports(done: "subprocess.CompletedProcess[str]") -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return sorted(
        (json.loads(line[line.index("{") :]) for line in done.stdout.splitlines()),
        key=lambda r: r["rank"],
    )


def test_seven_ranks_as_under_slurm(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    done = submit(
        "--backend",
        "local",
        "--env",
        "A=x y",
        "--",
        "report.py",
        "it's",
        "$(id)",
        env={
            "SLURM_JOB_ID": "9",
            "SLURM_PROCID": "3",
            "RANK_IS_NOT_SET": "1",
            "DDP_SLURM_TOKEN": "0" * 32,  # of a job that this shell runs in
        },
    )
    found = reports(done)
    assert {r["nodes_of_component"] for r in found} == {"1"}
    assert [
        (r["rank"], r["node"], r["local_rank"], r["local_world_size"], r["node_rank"])
        for r in found
    ] == [
        (0, "gamma", 0, 1, 0),
        (1, "beta", 0, 2, 1),
        (2, "beta", 1, 2, 1),
        (3, "alpha", 0, 4, 2),
        (4, "alpha", 1, 4, 2),
        (5, "alpha", 2, 4, 2),
        (6, "alpha", 3, 4, 2),
    ]
    assert {(r["world_size"], r["master_addr"], r["a"]) for r in found} == {(7, "127.0.0.1", "x y")}
    assert len({r["master_port"] for r in found}) == 1
    [token] = {str(r["token"]) for r in found}
    assert len(token.strip("0")) > 20
    assert found[0]["argv"] == ["it's", "$(id)"]
    labels = sorted(line.split("]")[0] for line in done.stdout.splitlines())
    assert labels == [
        "[0 gamma",
        "[1 beta",
        "[2 beta",
        "[3 alpha",
        "[4 alpha",
        "[5 alpha",
        "[6 alpha",
    ]


def test_step_processes_whole_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: z, gpus: 1}\n"
        "  - {name: 'a[1-2]', gpus: 2, interface: eno1, env: {NCCL_DEBUG: INFO, X: node}}\n"
    )
    options = {"command": ["python", "t.py"], "env": ["A=b c", "X=job"], "global_batch_size": "5"}
    plan = make_plan(Cluster.load(path), JobOptions.read(options))
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "3"}
    found = list(step_processes(plan, {**kept, "SLURM_PROCID": "8", "SLURM_CPU_BIND": "x"}))
    last = dict(found[4].environ)
    assert (found[4].argv, found[4].name, found[4].label) == (
        [sys.executable, "t.py"],
        "rank 4 on a2",
        "[4 a2] ",
    )
    assert 0 < int(last.pop("MASTER_PORT")) < 65536
    assert last == {
        **kept,
        **plan.job_env().to_environ(),
        "PYTHONUNBUFFERED": "1",
        "A": "b c",
        "X": "node",
        "NCCL_DEBUG": "INFO",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "5",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NODELIST": "a[1-2],z",
        "SLURM_JOB_NODELIST": "a[1-2],z",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "z",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "a[1-2]",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURMD_NODENAME": "a2",
        "SLURM_GTIDS": "3,4",
    }
    own = {**options, "nodes": "z", "env": ["MASTER_PORT=29555"]}
    plain = next(step_processes(make_plan(Cluster.load(path), JobOptions.read(own)), {})).environ
    assert (plain["OMP_NUM_THREADS"], plain["SLURM_NTASKS"], plain["MASTER_PORT"]) == (
        "1",
        "1",
        "29555",
    )
    assert not [name for name in plain if "HET" in name]


@pytest.mark.parametrize(
    ("visible", "listing", "gpus"),
    [
        (None, "echo 'GPU 0: X'; echo '  MIG 1g.10gb'; echo 'GPU 1: X'", ("0", "1")),
        (None, "echo 'GPU 0: X'; echo 'Unable to determine the device handle'; exit 15", ()),
        ("3,GPU-1c9f", "echo 'GPU 0: X'", ("3", "GPU-1c9f")),
        ("", "echo 'GPU 0: X'", ()),
        ("-1", "echo 'GPU 0: X'", ()),
        ("2,-1,3", "echo 'GPU 0: X'", ("2",)),
    ],
)
def test_visible_gpus(
    visible: str | None,
    listing: str,
    gpus: tuple[str, ...],
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub("nvidia-smi", f'[[ "$*" == --list-gpus ]] || exit 2; {listing}')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == gpus


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"container": "docker:x"}, "--container cannot be combined with"),
        ({"launcher": "torchrun"}, "--launcher cannot be combined with"),
        ({"setup": "module load cuda"}, "--setup cannot be combined with"),
        ({"conda-env": "torch"}, "--conda-env cannot be combined with"),
        ({"venv": "no-such-folder"}, "--venv: 'no-such-folder' has no bin/python"),
    ],
)
def test_options_of_other_backends_are_refused(
    uneven: Path, options: dict[str, str], words: str
) -> None:
    plan = make_plan(
        Cluster.load(uneven), JobOptions.read({"command": ["python", "t.py"], **options})
    )
    with pytest.raises(LocalError, match=words):
        list(step_processes(plan, {}))


@pytest.mark.parametrize("command", ["python train.py", "train.py"])
def test_the_python_of_a_virtual_environment(
    uneven: Path, submit: Command, tmp_path: Path, command: str
) -> None:
    python = tmp_path / "my env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$0 $VIRTUAL_ENV $1"\n')
    python.chmod(0o755)
    (python.parent / "python3").symlink_to("python")
    done = submit(
        "--backend",
        "local",
        "--gpus",
        "1",
        "--venv",
        str(tmp_path / "my env"),
        "--",
        *command.split(),
    )
    assert done.returncode == 0, done.stderr
    assert (
        re.sub("python3 ", "python ", done.stdout)
        == f"[0 gamma] {python} {tmp_path / 'my env'} train.py\n"
    )


def test_gpus_of_the_machine_are_dealt_out_node_by_node(
    uneven: Path, submit: Command, tmp_path: Path, stub: Stub
) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    stub("nvidia-smi", 'for i in 0 1 2 3; do echo "GPU $i: NVIDIA X (UUID: GPU-$i)"; done')
    found = reports(submit("--backend", "local", "--gpus", "3", "--", "report.py"))
    assert [(r["devices"], r["device_index"]) for r in found] == [("0", 0), ("1,2", 0), ("1,2", 1)]
    done = submit("--backend", "local", "--", "report.py")
    assert done.returncode == 2
    assert "the plan has 7 GPUs, this machine has 4; use --gpus 4" in done.stderr
    assert (
        len(
            reports(
                submit("--backend", "local", "--", "report.py", env={"CUDA_VISIBLE_DEVICES": ""})
            )
        )
        == 7
    )


def test_the_cluster_without_a_file_is_this_machine(
    submit: Command, tmp_path: Path, stub: Stub
) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    assert [r["world_size"] for r in reports(submit("--backend", "local", "--", "report.py"))] == [
        1
    ]
    assert len(reports(submit("--backend", "local", "--gpus", "2", "--", "report.py"))) == 2
    done = submit("--backend", "local", "--gpus", "999999999", "--", "report.py")
    assert (
        done.returncode,
        "--gpus: 999999999 ranks are too many for one machine" in done.stderr,
    ) == (2, True)
    stub("nvidia-smi", 'for i in 0 1 2; do echo "GPU $i: NVIDIA X"; done')
    assert len(reports(submit("--backend", "local", "--", "report.py"))) == 3


def test_long_and_unfinished_lines_are_kept(uneven: Path, submit: Command, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import sys; sys.stdout.write('x' * 300000 + '\\nend')")
    done = submit("--backend", "local", "--gpus", "1", "--", "long.py")
    assert done.stdout == f"[0 gamma] {'x' * 300000}\n[0 gamma] end\n"


def test_a_command_that_does_not_exist(uneven: Path, submit: Command) -> None:
    done = submit("--backend", "local", "--", "no-such-program")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-program: cannot be started: No such file or directory" in done.stderr
