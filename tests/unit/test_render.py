"""The text of the job script; tests/unit/test_job_script.py runs it."""

import os
import re
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


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.sbatch"))])
def test_every_function_of_the_script_is_defined(name: str) -> None:
    text = (GOLDEN / f"{name}.sbatch").read_text()
    code = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    defined = set(re.findall(r"^(_ddp_\w+)\(\) ", code, re.M))
    variables = set(re.findall(r"(?:local |for \(\(|^ *)(_ddp_\w+)=", code, re.M))
    variables |= set(re.findall(r"[$!{#](_ddp_\w+)", code))
    named = set(re.findall(r"_ddp_\w+", code))
    assert defined
    assert not named - defined - variables
