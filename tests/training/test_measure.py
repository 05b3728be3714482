"""``ddp-slurm measure``: from the ranks' timings to a file that ``plan`` reads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_slurm.comm import EXACT, Comm
from ddp_slurm.curve import Curve
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.exchange import Link
from ddp_slurm.job.speeds import read_speeds
from ddp_slurm.training.measure import cards, overlap
from ddp_slurm.training.measure.cards import CardSpeed, measure_card
from ddp_slurm.training.measure.forecast import advice, boxes_of, network_of
from ddp_slurm.training.measure.links import Ring, rings_of
from ddp_slurm.training.measure.speeds_file import RankSpeed, entries_of, speeds_text
from ddp_slurm.training.trainer.report import print_prediction
from ddp_slurm.training.uneven import calibrate
from ddp_slurm.training.uneven.calibrate import TrainingStep

from .workers import measured_card, measured_links, trained_with_slow_network
from .worlds import run_world

CLUSTER = """\
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}}
  - {name: alpha, gpus: {type: a100, count: 2}}
"""
SCRIPT = """\
import os, time, torch
from torch.nn.functional import mse_loss
from ddp_slurm.training import init_distributed

class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1000)

    def forward(self, inputs):
        fixed, each = (0.02, 0.004) if os.environ["SLURMD_NODENAME"] == "gamma" else (0.02, 0.001)
        time.sleep(fixed + each * len(inputs))
        return self.layer(inputs)

with init_distributed() as world:
    data = torch.randn(64, 1), torch.randn(64, 1000)
    {line}
print("trained")
"""


def test_measure_writes_speeds_that_plan_predicts_by(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    line = "world.shares(64, Sleepy(), mse_loss, data)"
    (tmp_path / "train.py").write_text(SCRIPT.replace("{line}", line))
    done = ddp_slurm(tmp_path, "measure", "--backend", "local", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert "trained" not in done.stdout
    assert "speeds.yaml: titan, a100; 2 links. See: ddp-slurm plan" in done.stderr
    speeds = read_speeds(tmp_path / "speeds.yaml")
    for name, each in (("titan", 0.004), ("a100", 0.001)):
        for samples in (4, 64):
            seconds = speeds.entries[name].curve.seconds(samples)
            assert 0.02 + each * samples <= seconds < 2 * (0.02 + each * samples)
    assert speeds.measured is not None
    assert speeds.measured.model == "Sleepy"
    assert speeds.measured.gradient_bytes == 4 * 2000
    network = speeds.measured.network()
    assert network is not None
    assert set(network.links) == {frozenset(["alpha"]), frozenset(["alpha", "gamma"])}
    options = ("--global-batch-size", "64", "--balance", "speeds.yaml")
    planned = ddp_slurm(tmp_path, "plan", *options)
    assert "this plan" in planned.stdout, planned.stderr
    again = ddp_slurm(tmp_path, "measure", "--backend", "local", "--", "python", "-c", "0")
    assert again.returncode == 2
    assert "speeds.yaml was not written: the command chose no shares" in again.stderr
    assert read_speeds(tmp_path / "speeds.yaml") == speeds


def ddp_slurm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_slurm.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_trainer_measures_with_its_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "speeds.yaml"
    environ = {"DDP_SLURM_BALANCE": "measured", "DDP_SLURM_MEASURE_FILE": str(file)}
    environ["DDP_SLURM_MEASURED_RANKS"] = "box1/titan,box2/"
    assert run_world(tmp_path, (1, 1), measured_card, environ=environ) == [0, 0]
    speeds = read_speeds(file)
    assert list(speeds.entries) == ["titan", "box2"]
    assert speeds.entries["titan"].curve.seconds(4) > 0.05, "the optimizer's sleep is in it"


def test_card_that_runs_out_of_memory_keeps_what_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 16

    def seconds_of_step(step: object, work: object, size: int, **options: object) -> float:
        if size > limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return size / 1000

    monkeypatch.setattr(calibrate, "seconds_of_step", seconds_of_step)
    monkeypatch.setattr(cards, "all_gather_values", lambda value, control: [value])
    monkeypatch.setattr(cards.dist, "barrier", lambda group: None)
    device = torch.device("cpu")
    step = TrainingStep(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, None, device)
    assert measure_card(step, None) == CardSpeed([(4, 0.004), (8, 0.008), (16, 0.016)], 16)  # type: ignore[arg-type]
    assert measure_card(step, None, most=8) == CardSpeed([(4, 0.004), (8, 0.008)], None)  # type: ignore[arg-type]
    assert measure_card(step, None, most=3) == CardSpeed([(3, 0.003)], None)  # type: ignore[arg-type]
    limit = 2
    with pytest.raises(DdpSlurmError, match=r"a batch of 4 samples does not fit the memory of cpu"):
        measure_card(step, None)  # type: ignore[arg-type]


def test_hidden_part_is_unknown_without_a_common_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap.dist, "get_world_size", lambda: 2)
    curves = [Curve.through([(3, 0.003)]), Curve.through([(4, 0.004), (8, 0.008)])]
    assert overlap.measure_hidden(None, curves, [], 4000) is None  # type: ignore[arg-type]


def test_links_of_all_pairs_and_inside_nodes(tmp_path: Path) -> None:
    found = run_world(tmp_path, (2, 1), measured_links)
    rings, links = found[0]
    assert found == [found[0]] * 3
    assert rings == [Ring((0, 1), (0, 0)), Ring((0, 2), (0, 1))]
    assert all(link.bandwidth > 1e6 and 0 < link.latency < 0.1 for link in links)
    assert len(links) == 2
    assert isinstance(links[0], Link)


def test_many_nodes_are_measured_with_two_others_each() -> None:
    assert len(rings_of([0, 1, 2, 3, 4, 5])) == 15
    pairs = [ring.nodes for ring in rings_of(list(range(9)))]
    assert pairs == [(0, n) for n in range(1, 9)] + [(n, n + 1) for n in range(1, 8)]


def rank(node: str, gpu_type: str | None, factor: float, limit: int | None = None) -> RankSpeed:
    points = [(4, 0.001 * factor), (8, 0.002 * factor)]
    return RankSpeed(node, gpu_type, f"NVIDIA {gpu_type}", CardSpeed(points, limit))


def test_entries_are_of_types_and_of_unlike_nodes(tmp_path: Path) -> None:
    ranks = [rank("n1", "a100", 1.0), rank("n1", "a100", 1.01), rank("n2", "a100", 1.0, 8)]
    ranks += [rank("hot", "a100", 1.5), rank("old", None, 5.0), rank("mix", "t4", 3)]
    ranks += [rank("mix", "v100", 2)]
    entries = entries_of(ranks)
    assert list(entries) == ["a100", "t4", "v100", "hot", "old"]
    assert entries["a100"]["points"] == [[4, 0.001005], [8, 0.00201]]
    assert entries["hot"]["points"] == [[4, 0.0015], [8, 0.003]]
    assert entries["a100"]["max_batch"] == 8
    file = tmp_path / "speeds.yaml"
    links = [{"nodes": ["n1", "n2"], "bandwidth": 117000000, "latency": 1.5e-05}]
    measured = {"model": 'My "Net": x', "hidden": None, "gradient_bytes": 4000, "links": links}
    file.write_text(speeds_text(ranks, measured))
    speeds = read_speeds(file)
    assert speeds.entries["old"].curve.seconds(8) == 0.01
    assert speeds.measured is not None
    assert speeds.measured.model == 'My "Net": x'
    network = speeds.measured.network()
    assert network is not None
    assert network.between("n2", "n1") == Link(117e6, 1.5e-05)


def test_advice_where_one_node_alone_is_faster() -> None:
    """Of 100 samples the fast node takes 10 ms alone; 8 MB go over the link in 80 ms."""
    curves = [Curve.line(0.0, 0.0001), Curve.line(0.0, 0.0004)]
    boxes = boxes_of(["fast", "slow"], curves, 100)
    network = network_of(["fast", "slow"], Link(100e6, 0.0), 8e6, EXACT)
    text = advice(100, boxes, network, EXACT)
    # together: 8 ms of compute; behind half of it, without the first bucket, 80 ms hide: 84.5 ms
    assert text == (
        "slower than fast alone, predicted: 1,183 against 10,000 images/s (a step of 84.5 ms: "
        "compute 8, network 76.5); what would help: a global batch of 400: 3,940; "
        "--comm auto:local, which is not exact: 12,500; --nodes fast: 10,000"
    )
    faster = network_of(["fast", "slow"], Link(100e9, 0.0), 8e6, EXACT)
    assert advice(100, boxes, faster, EXACT) is None


@pytest.mark.parametrize(
    ("comm", "is_proposed"), [("bf16", True), ("auto:bf16", True), ("local:8", False)]
)
def test_advice_proposes_what_is_not_yet_allowed(comm: str, is_proposed: bool) -> None:
    curves = [Curve.line(0.0, 0.0001), Curve.line(0.0, 0.0004)]
    boxes = boxes_of(["fast", "slow"], curves, 100)
    network = network_of(["fast", "slow"], Link(10e6, 0.0), 8e6, Comm.read(comm))
    text = advice(100, boxes, network, Comm.read(comm))
    assert text is not None
    assert "a global batch of 400: " in text
    assert ("--comm auto:local, which is not exact: " in text) == is_proposed
    assert "--nodes fast: 10,000" in text


def test_prediction_is_printed_beside_what_a_step_took(capsys: pytest.CaptureFixture[str]) -> None:
    print_prediction(0.010, [0.5, 0.011, 0.012, 0.013], 100)
    assert capsys.readouterr().out == (
        "a step was predicted to take 10 ms, 10,000 images/s; it took 12 ms, 8,333 images/s "
        "(+20 %)\n"
    )
    print_prediction(None, [0.5], 100)
    print_prediction(0.010, [], 100)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("planned", [True, False])
def test_trainer_reports_prediction_and_slow_network(tmp_path: Path, planned: bool) -> None:
    environ = {"DDP_SLURM_BALANCE": "measured"}
    if planned:
        environ = {"DDP_SLURM_SHARES": "4,4", "DDP_SLURM_PREDICTED_STEP": "0.004"}
    run_world(tmp_path, (1, 1), trained_with_slow_network, environ=environ)
    text = (tmp_path / "rank0.log").read_text()
    assert re.search(r"^a step was predicted to take [\d.]+ ms, .*; it took ", text, re.M), text
    if planned:
        assert "a step was predicted to take 4 ms, 2,000 images/s; it took" in text
        assert "slower than" not in text
    else:
        assert text.count("slower than vm1 alone, predicted: ") == 1, text
