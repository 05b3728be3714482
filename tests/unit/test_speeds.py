"""The file of speeds, relative speeds, and what ``plan`` predicts by them."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.exchange import HIDDEN, Link
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.speeds import SpeedsError, read_speeds
from ddp_slurm.job_env import JobEnv, JobEnvError, KnownLimits
from ddp_slurm.plan import Plan, PlanError, forecast_text, make_plan
from ddp_slurm.plan.table import plan_table
from ddp_slurm.schema.schema import Invalid

CARDS = """\
titan: {points: [[8, 0.02], [32, 0.05], [128, 0.19]], max_batch: 300}
v100: {points: [[8, 0.012], [32, 0.02], [128, 0.06]]}
a100: {points: [[8, 0.010], [32, 0.012], [128, 0.02], [512, 0.06]], card: NVIDIA A100-SXM4}
"""
SLOW_GAMMA = """\
measured:
  date: 2026-11-28T17:50:00Z
  model: CifarResNet
  precision: bf16
  gradient_bytes: 44700000
  versions: {torch: 2.11.0+cu128}
  links:
    - {nodes: [alpha, beta], bandwidth: 1.17e10, latency: 0.00005}
    - {nodes: [alpha, gamma], bandwidth: 117000000, latency: 0.0001}
    - {nodes: [beta, gamma], bandwidth: 1.17e8}
"""


def plan_of(cluster: Path, speeds: str, **options: Any) -> Plan:
    file = cluster.with_name("speeds.yaml")
    file.write_text(speeds)
    given = {"global_batch_size": 2048, "balance": str(file), **options}
    return make_plan(Cluster.load(cluster), JobOptions(**given))


def test_file_of_speeds_has_cards_and_links(tmp_path: Path) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text(CARDS + SLOW_GAMMA)
    speeds = read_speeds(file)
    assert speeds.entries["a100"].curve.seconds(70) == pytest.approx(0.012 + 38 / 96 * 0.008)
    assert speeds.entries["titan"].max_batch == 300
    assert speeds.measured is not None
    network = speeds.measured.network()
    assert network is not None
    assert network.gradient_bytes == 44_700_000
    assert network.hidden == HIDDEN
    assert network.between("gamma", "beta") == Link(1.17e8, 0.0)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, None),  # gamma's link is the limit: the fewest messages
        ({"nodes": "beta,alpha"}, 1 << 20),  # the last bucket alone is not hidden
        ({"nodes": "beta,alpha", "comm": "bf16"}, 1 << 20),
        ({"nodes": "beta,alpha", "comm": "local:8"}, None),
        ({"nodes": "beta,alpha", "comm": "powersgd"}, None),
    ],
)
def test_buckets_of_a_job_are_the_best_for_its_links(
    uneven: Path, options: dict[str, str], size: int | None
) -> None:
    plan = plan_of(uneven, CARDS + SLOW_GAMMA, **options)
    assert plan.job_env().bucket_bytes == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t: {points: [[8, 1], [8, 2]]}", "s.yaml:1: t.points: the samples [8, 8] must ascend"),
        ("t: {points: [[8, 1, 2]]}", "t.points[0]: expected [samples, seconds], such as"),
        ("t: {points: [[8, 0]]}", "t.points[0]: 0 is too little; it must be more than 0"),
        ("t: {points: []}", "t.points: an empty list; expected [[samples, seconds], ...]"),
        ("t: {points: [[1, 1]], beta: 1}", "t.points: cannot be combined with beta"),
        ("t: {alpha: 1}", "t.beta: missing; give beta, in seconds a sample, or points"),
        ("measured: {model: x}", "s.yaml:1: no node and no GPU type; give one"),
        ("t: {beta: 1}\nmeasured: 3", "s.yaml:2: measured: expected keys such as 'date:'"),
        ("t: {beta: 1}\nmeasured: {hidden: 2}", "measured.hidden: '2' is not a part"),
        ("t: {beta: 1}\nmeasured: {gradient_bytes: 0}", "'0' is not a number of bytes > 0"),
        ("t: {beta: 1}\nmeasured: {gradient_bytes: 45M}", "'45M' is not a number of bytes"),
        (
            "t: {beta: 1}\nmeasured:\n  links:\n    - {nodes: [a], bandwidth: 1}\n",
            "s.yaml:4: measured.links[0].nodes: expected two nodes, such as [alpha, beta]",
        ),
        ("t: {beta: 1}\nmeasured: {links: [{nodes: [a, b]}]}", "links[0].bandwidth: missing"),
        ("- t", "expected a mapping, got a list"),
    ],
)
def test_file_of_speeds_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SpeedsError) as caught:
        read_speeds(file)
    assert message in str(caught.value)


def test_relative_speeds_give_shares_in_proportion(uneven: Path) -> None:
    cluster = Cluster.load(uneven)
    options = JobOptions(global_batch_size=150, balance="a100=3,v100=1, titan=1")
    assert make_plan(cluster, options).shares == (10, 10, 10, 30, 30, 30, 30)
    by_node = JobOptions(global_batch_size=60, balance="beta=2.5,gamma=1", nodes="gamma,beta")
    plan = make_plan(cluster, by_node)
    assert plan.shares == (10, 25, 25)
    assert "PREDICTED" not in plan_table(plan), "no times follow from relative speeds"


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ("a100=3,v100=2,titn=1", "'titn' is neither a GPU type nor a node of cluster 'lab'; did"),
        ("a100=3,v100=2", "neither node 'gamma' nor its GPU type 'titan' is in the list; give one"),
        ("a100=3,v100=0,titan=1", "'v100=0' is not TYPE=SPEED with a speed above 0"),
        ("a100=fast", "'a100=fast' is not TYPE=SPEED with a speed above 0, such as rtx3090=2"),
        ("a100=1,a100=2", "duplicate 'a100' in 'a100=1,a100=2'"),
        ("a100=1,,titan=2", "'' is not TYPE=SPEED"),
        ("a b=1", "'a b' is not a plain word"),
    ],
)
def test_relative_speeds_errors(uneven: Path, balance: str, message: str) -> None:
    with pytest.raises((PlanError, Invalid)) as caught:
        make_plan(Cluster.load(uneven), JobOptions(global_batch_size=8, balance=balance))
    assert message in str(caught.value)


def test_plan_first_names_the_nodes_that_slow_it_down(uneven: Path) -> None:
    plan = plan_of(uneven, CARDS + SLOW_GAMMA)
    lines = plan_table(plan).splitlines()
    assert re.fullmatch(
        r"faster without gamma: 3\.8k -> 38k images/s \(--nodes auto\)", lines[0]
    ), lines[0]
    assert lines[1].endswith("SHARES           COMPUTE MS           BUSY %")
    alpha = next(line for line in lines if " alpha " in line)
    shares = plan.shares[3:] if plan.shares else ()
    seconds = [0.06 + (share - 512) * 0.04 / 384 for share in shares]
    assert " ".join(f"{1000 * one:.3g}" for one in seconds) in alpha
    rows = {line[:12].strip(): line[12:].split() for line in lines[7:]}
    assert rows["this plan"][-1] == "gamma,beta,alpha"
    assert rows["fastest"][-1] == "beta,alpha"
    assert rows["best node"][-1] == "alpha"
    _, step, compute, network, waiting, _ = rows["this plan"]
    assert float(step) == pytest.approx(float(compute) + float(network), rel=0.01)
    # 2 * 2 / 3 of the gradients over gamma's link, in 3 all-reduces, less what backward hides
    exchange = 4 / 3 * 44.7e6 / 117e6 + 12 * 0.0001
    assert float(network) == pytest.approx(1000 * exchange - float(compute) / 2, rel=0.01)
    assert float(waiting) < 1
    assert "by " in lines[-1]
    assert lines[-1].endswith(
        "speeds.yaml, CifarResNet, bf16, 2026-11-28T17:50:00Z; 44.7 MB of gradients"
    )


def test_rates_have_two_digits() -> None:
    assert doctest.testmod(forecast_text) == (0, 1)


def test_plan_without_links_leaves_the_network_out(uneven: Path) -> None:
    text = plan_table(plan_of(uneven, CARDS, global_batch_size=700))
    assert "faster without" not in text
    assert text.endswith("speeds.yaml, which has no links: the network is left out\n")
    # 100 samples on each: 149 ms on the titan, 48 on a v100, 18 on an a100
    assert re.search(r"equal split +4\.7k +149 +149 +0 +104 ", text)


def test_auto_takes_the_fastest_nodes(uneven: Path) -> None:
    plan = plan_of(uneven, CARDS + SLOW_GAMMA, nodes="auto")
    assert [node.name for node in plan.machines] == ["beta", "alpha"]
    assert "faster without" not in plan_table(plan)
    chosen = plan_of(uneven, CARDS + SLOW_GAMMA, nodes="auto,gamma,beta")
    assert [node.name for node in chosen.machines] == ["beta"]
    everything = plan_of(uneven, CARDS, nodes="auto")
    assert len(everything.machines) == 3, "without links nothing is lost by a slow node"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "equal"}, "--nodes auto needs --global-batch-size N and --balance FILE"),
        ({"balance": "a100=2,v100=1,titan=1"}, "--nodes auto needs --global-batch-size N"),
        ({"gpus": 3}, "--nodes auto cannot be combined with --gpus"),
        ({"nodes": "auto,delta"}, "--nodes: 'delta' is not a node of cluster 'lab'"),
        ({"nodes": "auto,gamma", "uneven": True}, "add up to less than the global batch of 2048"),
    ],
)
def test_auto_errors(uneven: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_of(uneven, CARDS + SLOW_GAMMA, **{"nodes": "auto", **options})


@pytest.mark.parametrize(
    ("cards", "of_card"),
    [
        ("a: {points: [[8, 1], [64, 2]], max_batch: 40, card: RTX}", {"RTX": 40}),
        ("a: {points: [[8, 1], [64, 2]], card: RTX}", {"RTX": 64}),
        (
            "a: {beta: 1, max_batch: 40, card: RTX}\nb: {beta: 1, max_batch: 9, card: RTX}",
            {"RTX": 9},
        ),
        ("a: {points: [[8, 1]], max_batch: 40}", None),
    ],
)
def test_ranks_know_the_micro_batches_of_the_file(
    uneven: Path, cards: str, of_card: dict[str, int] | None
) -> None:
    entries = "titan: {beta: 1}\nv100: {beta: 1}\na100: {beta: 1}\n"
    env = plan_of(uneven, entries + cards + "\n" + SLOW_GAMMA).job_env()
    expected = of_card and KnownLimits("CifarResNet", "bf16", of_card)
    assert env.known_limits == expected
    assert JobEnv.from_environ(env.to_environ()).known_limits == expected
    assert plan_of(uneven, entries + cards).job_env().known_limits is None


@pytest.mark.parametrize("text", ["x", "3", '["m", "bf16"]', '["m", "bf16", {"RTX": "many"}]'])
def test_known_limits_errors(text: str) -> None:
    with pytest.raises(JobEnvError, match=r"DDP_SLURM_KNOWN_LIMITS=.* is not JSON such as"):
        JobEnv.from_environ({"DDP_SLURM_KNOWN_LIMITS": text})
