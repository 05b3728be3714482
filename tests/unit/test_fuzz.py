"""Whatever is in a file or in the output of a program: a result or an error of our own."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import example, given

from ddp_slurm.admin.facts import parse_facts
from ddp_slurm.admin.gpus import gres_types, nvidia_error, nvidia_warning, parse_gpus
from ddp_slurm.admin.gpus.nvidia import undivided_mig_cards
from ddp_slurm.admin.probed_cluster import gpu_models, probed_node
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.cluster.discover import cluster_of
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.speeds import read_speeds
from ddp_slurm.plan import make_plan
from ddp_slurm.plan.request import Request, plan_request
from ddp_slurm.plan.table import plan_table
from ddp_slurm.render import render_sbatch
from ddp_slurm.runs.commands import status
from ddp_slurm.slurm_client.sources import (
    parse_exit_marker,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
)
from ddp_slurm.slurm_client.whole_job import job_of
from tests.clusters import UNEVEN
from tests.fuzzing import data_of, fuzz, holds, no_write_outside, texts

from .test_gpus import AMD_SMI, CAPABILITY, INFORMATION, MIG_LIST, MIG_MODE, NVIDIA_SMI, ROCM_SMI
from .test_speeds import CARDS, SLOW_GAMMA

HERE = Path(__file__).parent
NODES = [path.read_text() for path in sorted(HERE.glob("scontrol/*/node*.txt"))]
PARTITIONS = [path.read_text() for path in sorted(HERE.glob("scontrol/*/partition*.txt"))]
JOBS = [path.read_text() for path in sorted(HERE.glob("job_states/*/*.scontrol"))]
QUEUES = [path.read_text() for path in sorted(HERE.glob("job_states/*/*.squeue"))]
FULL_CLUSTER = """\
name: lab
ssh: {user: me, port: 22, key: ~/.ssh/id}
nodes:
  - name: "gpu[01-04]"
    gpus: {type: titan, count: 1}
    cpus: 8
    memory: 30G
  - {name: alpha, address: 192.168.8.151, interface: eno1, gpus: [{type: a100, count: 4}],
     cpus: 32, memory: 240G, partition: big, constraint: "a&b", env: {A: b}}
"""
JOB = """\
name: synthetic
time: 1-00:10
global-batch-size: 256
command: [python, train.py, "5"]
nodes: gamma,alpha
env: {A: b, C: "d e"}
setup: [module load cuda]
sbatch: [comment=x, "1:nice=3"]
signal-seconds: 90
max-restarts: 3
memory: 30G
output: logs/%x-%j.out
balance: {a100: 3, v100: 2, titan: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "plain.yaml").write_text(UNEVEN)
    return folder


OPTIONS = JobOptions(command=("python", "train.py"), global_batch_size=64)


@fuzz
@given(texts(UNEVEN, FULL_CLUSTER))
def test_any_cluster_yaml_is_read_or_refused(folder: Path, text: str) -> None:
    path = folder / "cluster.yaml"
    path.write_bytes(data_of(text))
    with no_write_outside(folder):
        holds(lambda: render_sbatch(make_plan(Cluster.load(path), OPTIONS)))


@fuzz
@given(texts(JOB))
def test_any_job_yaml_is_read_or_refused(folder: Path, text: str) -> None:
    path = folder / "job.yaml"
    path.write_bytes(data_of(text))
    request = Request(folder / "plain.yaml", path, {})
    with no_write_outside(folder):
        holds(
            lambda: render_sbatch(plan_request(request)), lambda: plan_table(plan_request(request))
        )


@fuzz
@given(texts(CARDS + SLOW_GAMMA))
def test_any_file_of_speeds_is_read_or_refused(folder: Path, text: str) -> None:
    path = folder / "speeds.yaml"
    path.write_bytes(data_of(text))
    typed = {"command": ["true"], "global_batch_size": "2048", "balance": str(path)}
    request = Request(folder / "plain.yaml", None, typed)
    with no_write_outside(folder):
        holds(lambda: read_speeds(path))
        holds(lambda: plan_table(plan_request(request)), printable=False)


@fuzz
@given(texts(*NODES), texts(*PARTITIONS))
def test_any_nodes_of_scontrol_are_read_or_refused(nodes: str, partitions: str) -> None:
    def plan() -> str:
        return render_sbatch(make_plan(cluster_of(nodes, partitions, "lab").cluster, OPTIONS))

    holds(plan, printable=False)


@fuzz
@given(texts(*JOBS))
@example("JobId=2HetJobId=1 HetJobOffset=0 JobState=COMPLETED")
@example("JobId=1 HetJobId=x HetJobOffset=0 JobState=COMPLETED")
def test_any_job_of_scontrol_is_read(text: str) -> None:
    state = parse_scontrol(text)
    if state is not None:
        holds(state.describe, lambda: json.dumps(state.as_dict()), printable=False)


@fuzz
@given(texts(*QUEUES))
def test_any_output_of_squeue_is_read(text: str) -> None:
    for job_id, components in parse_squeue(text).items():
        holds(job_of(job_id, components, "squeue").describe, printable=False)


@fuzz
@example("48+0|\t|FAILED|1:9|beta\n")
@given(texts("48+0|COMPLETED|0:0|alpha\n48+1|FAILED|1:9|beta\n"))
def test_any_output_of_sacct_is_read(text: str) -> None:
    components = parse_sacct(text)
    if components:
        holds(job_of("48", components, "sacct").describe, printable=False)


@fuzz
@given(texts("status=143\nterminated=yes\nended=2026-11-28T17:50:00Z\nhost=a\nrestarts=0\n"))
def test_any_exit_marker_is_read(text: str) -> None:
    component = parse_exit_marker(text)
    if component is not None:
        holds(job_of("48", [component], "exit marker").describe, printable=False)


@fuzz
@given(texts(NVIDIA_SMI), texts(CAPABILITY, MIG_MODE), texts(MIG_LIST), texts(INFORMATION))
@example("0, 00000000:17:00.0, 81920, 550.54.15,", "", "", "")
def test_any_output_of_nvidia_smi_is_read(
    cards: str, capability: str, mig: str, information: str
) -> None:
    outputs = {
        "nvidia-smi": [(0, cards)],
        "nvidia-smi.capability": [(0, capability)],
        "nvidia-smi.mig": [(0, capability)],
        "nvidia-smi.list": [(0, mig)],
        "nvidia.information": [(0, information)],
    }
    holds(
        lambda: gpu_models(found := parse_gpus(outputs), gres_types(card.name for card in found)),
        lambda: undivided_mig_cards(outputs),
        lambda: [nvidia_error(9, cards), nvidia_warning(0, cards)],
    )


@fuzz
@given(texts(AMD_SMI), texts(ROCM_SMI))
def test_any_output_of_amds_tools_is_read(new: str, old: str) -> None:
    holds(lambda: parse_gpus({"amd-smi": [(0, new)]}), lambda: parse_gpus({"rocm-smi": [(0, old)]}))


FACTS = f"""Welcome
facts begin
fact hostname alpha.lab
fact memory_kib 65536000
fact cpu 0 0
fact cpu 0 1
fact cpus_usable 2
block nvidia-smi 0
|{NVIDIA_SMI.splitlines()[0]}
block addresses 0
|2: eno1    inet 192.168.8.151/24 brd 192.168.8.255 scope global eno1
block routes 0
|eno1 0000A8C0 00000000 0001 0 0 100 00FFFFFF
fact interface eno1 up 1000
block training 0
|facts {{"python": "3.11.2", "torch": "2.11.0", "cuda": "13.0"}}
facts end
"""


@fuzz
@given(texts(FACTS))
@example(FACTS.replace("\nfact cpu 0 1", "fact cpu 0 1"))
def test_any_report_of_a_node_is_read_or_refused(folder: Path, text: str) -> None:
    asked = Cluster.load(folder / "plain.yaml").nodes[0]

    def probe() -> Node:
        facts = parse_facts(text)
        types = gres_types(card.name for card in facts.gpus)
        assert isinstance(facts.training, dict)
        facts.link_speed_mbit("eno1")
        return probed_node(asked, facts, types, ["192.168.8.1"])

    holds(probe, printable=False)


RECORD = json.dumps(
    {
        "job_id": "48",
        "backend": "local",
        "directory": "/home/me",
        "log": "logs/a.out",
        "submitted": "2026-11-28T17:50:00Z",
        "command": ["python", "train.py"],
        "repeat": ["ddp-slurm", "submit"],
        "process": {"host": "alpha", "pid": 1, "started": 12},
    }
)
PLAN = json.dumps({"world_size": 1, "ranks": [{"rank": 0, "node": "alpha"}], "launcher": "srun"})
LOOK = json.dumps(
    {
        "state": "FAILED",
        "source": "sacct",
        "log": "a.out",
        "components": [{"job_id": "48", "state": "FAILED", "nodes": "alpha", "exit_status": 1}],
    }
)


@fuzz
@given(texts(RECORD), texts(PLAN), texts(LOOK), texts("status=1\nterminated=no\n", ""))
def test_any_run_folder_is_shown_or_refused(
    folder: Path, record: str, plan: str, look: str, marker: str
) -> None:
    run = folder / "ddp_slurm_runs" / "48"
    run.mkdir(parents=True, exist_ok=True)
    texts_of_files = {"run.json": record, "plan.json": plan, "state.json": look, "exit": marker}
    for name, text in texts_of_files.items():
        (run / name).write_bytes(data_of(text))

    def show() -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status("48", folder)
        return out.getvalue()

    with pytest.MonkeyPatch.context() as patch, no_write_outside(folder):
        patch.setenv("PATH", str(folder))  # no Slurm
        holds(show)
