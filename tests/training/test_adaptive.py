"""Shares that follow the ranks' speeds: in time, not for noise, and with the exact gradient."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_slurm.balance import BalanceError
from ddp_slurm.curve import Curve
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import BalancedSampler
from ddp_slurm.training.adaptive.rule import Seen, Speeds
from ddp_slurm.training.trainer.adaptive import check_adaptive

from .adaptive_worker import Ranks, adaptive
from .trainer_worker import Report, Run, reference, relative_error
from .worlds import world

OPTIONS = {"adapt_shares": True, "shares": None, "log_every_steps": 1, "graphs": "off"}
SLOWER = Ranks(slow=(2, 12, 2.0))


def settings(folder: Path, **changes: Any) -> Run:
    """Eight whole steps of 12 and one of 4 in an epoch."""
    run = Run((4, 4, 4), folder / "s.pt", samples=100, epochs=5, stateful=False, options=OPTIONS)
    return replace(run, **changes)


def run_adaptive(
    folder: Path, tasks: tuple[int, ...], run: Run, ranks: Ranks
) -> tuple[list[Report], str]:
    """The reports of all ranks, and what rank 0 printed."""
    size = sum(tasks)
    run = replace(run, options={**run.options, "global_batch": 12})
    with world(folder, tasks, adaptive, run, ranks) as running:
        reports = []
        for rank in range(size):
            message = running.receive(rank)
            while isinstance(message, int):
                message = running.receive(rank)
            reports.append(message)
        assert running.wait() == [0] * size, running.all_logs()
        return reports, running.log(0)


def shares_over_time(report: Report) -> list[list[int]]:
    """Those of each step."""
    return [record["shares"] for record in report.records if record["kind"] == "train"]


def assert_each_sample_once_an_epoch(reports: Sequence[Report], steps: int = 9) -> None:
    for first in range(0, len(reports[0].seen), steps):
        own = [chain(*report.seen[first : first + steps]) for report in reports]
        assert sorted(chain(*own)) == list(range(100))


def test_adaptive_shares_follow_a_slower_rank(tmp_path: Path) -> None:
    reports, log = run_adaptive(tmp_path, (1, 2), settings(tmp_path), SLOWER)
    shares = shares_over_time(reports[0])
    assert [list(each) for each, _ in groupby(shares)] == [[4, 4, 4], [5, 5, 2]]
    # Measured every 6 steps: two measurements after the change is the second one's use.
    assert 12 < shares.index([5, 5, 2]) <= 12 + 3 * 6
    assert "4 4 4 -> 5 5 2, so that the slowest rank takes 5 ms instead of 8\n" in log
    assert_each_sample_once_an_epoch(reports)
    for report in reports:
        assert relative_error(report.weights, reference(settings(tmp_path))) < 1e-9


def test_adaptive_shares_accumulate_and_clip_exactly(tmp_path: Path) -> None:
    options = {**OPTIONS, "micro_batch": 2, "clip_norm": 0.2}
    run = settings(tmp_path, options=options, epochs=3)
    reports, _ = run_adaptive(tmp_path, (1, 2), run, SLOWER)
    assert shares_over_time(reports[0])[-1] != [4, 4, 4]
    for report in reports:
        assert relative_error(report.weights, reference(run, clip_norm=0.2)) < 1e-9


def test_adaptive_shares_of_equal_ranks_stay(tmp_path: Path) -> None:
    run = settings(tmp_path)
    reports, log = run_adaptive(tmp_path, (1, 2), run, Ranks(noise=0.05))
    assert all(each == [4, 4, 4] for each in shares_over_time(reports[0]))
    assert "new shares" not in log


@pytest.mark.parametrize("tasks", [(1, 2), (2,)])
def test_adaptive_shares_survive_a_kill(tmp_path: Path, tasks: tuple[int, ...]) -> None:
    """Killed after new shares in mid-epoch, and resumed: also by another number of ranks."""
    run = settings(tmp_path, kill=(1, "before step", 25))
    options = {**run.options, "global_batch": 12}
    with world(tmp_path, (1, 2), adaptive, replace(run, options=options), SLOWER) as running:
        assert running.wait()[1] == -9
        assert "4 4 4 -> 5 5 2" in running.log(0)
    reports, _ = run_adaptive(tmp_path / "again", tasks, settings(tmp_path), SLOWER)
    assert reports[0].first_step == 24
    done = 24 % 9 * 12
    rest = [chain(*report.seen[:3]) for report in reports]
    order = BalancedSampler(100, [12], 0)
    order.set_epoch(2)
    assert sorted(chain(*rest)) == sorted(order.order()[done:].tolist())
    for report in reports:
        assert relative_error(report.weights, reference(settings(tmp_path))) < 1e-9


def seen(speeds: Speeds, shares: Sequence[int], *compute: float, update: float = 0.0) -> None:
    speeds.add(shares, [Seen(seconds, update) for seconds in compute])


def equal_speeds() -> Speeds:
    return Speeds([Curve.line(0.0, 0.001)] * 2)


def test_speeds_ignore_a_single_disturbance() -> None:
    speeds, shares = equal_speeds(), [10, 10]
    seen(speeds, shares, 0.01, 0.01)
    seen(speeds, shares, 0.01, 0.01)
    seen(speeds, shares, 0.01, 0.05)
    assert speeds.better(shares) is None
    seen(speeds, shares, 0.01, 0.05)
    assert speeds.better(shares) == [17, 3]


def test_speeds_within_the_dead_band_change_nothing() -> None:
    speeds, shares = equal_speeds(), [1000, 1000]
    for _ in range(4):
        seen(speeds, shares, 1.0, 1.05)
        assert speeds.better(shares) is None
    assert equal_speeds().better(shares) is None


def test_speeds_count_the_update_once() -> None:
    """Half of the slower rank's time is its optimizer: fewer samples do not shorten that."""
    speeds, shares = equal_speeds(), [10, 10]
    for _ in range(3):
        assert speeds.better(shares) is None
        speeds.add(shares, [Seen(0.01, 0.0), Seen(0.01, 0.01)])
    assert speeds.better(shares) == [15, 5]
    assert speeds.slowest([15, 5]) == pytest.approx(0.015)


def test_speeds_that_a_step_hardly_depends_on_change_nothing() -> None:
    """A step of 100 ms, of which a rank computes 1 or 2: the exchange or Python sets the pace."""
    speeds, shares = equal_speeds(), [10, 10]
    for _ in range(3):
        speeds.add(shares, [Seen(0.001, 0.0, step=0.1), Seen(0.002, 0.0, step=0.1)])
    assert speeds.better(shares) is None


def test_speeds_of_a_rank_without_samples_are_kept() -> None:
    speeds = equal_speeds()
    seen(speeds, [19, 1], 0.019, 0.05)
    seen(speeds, [20, 0], 0.02, 0.0)
    seen(speeds, [20, 0], 0.02, 0.0)
    assert speeds.slower(1) == pytest.approx(50)


def test_speeds_seen_after_new_shares_agree_with_them() -> None:
    """What follows from new shares is the time that was expected: no second change."""
    speeds, shares = equal_speeds(), [100, 100]
    for _ in range(3):
        seen(speeds, shares, 0.1, 0.2)
    found = speeds.better(shares)
    assert found == [133, 67]
    for _ in range(4):
        seen(speeds, found, 0.133, 0.134)
        assert speeds.better(found) is None


@pytest.mark.parametrize("shares", [[3, 4], [4, 5, -1], [2, 2, 2]])
def test_sampler_refuses_shares_of_another_sum(shares: list[int]) -> None:
    sampler = BalancedSampler(20, [4, 3, 1], 0)
    with pytest.raises(BalanceError, match="expected 3 shares with the sum 8"):
        sampler.set_shares(shares)


def test_sampler_gives_every_sample_once_over_new_shares() -> None:
    samplers = [BalancedSampler(23, [4, 3, 1], rank) for rank in range(3)]
    given = []
    for step in range(3):
        if step == 1:
            for sampler in samplers:
                sampler.set_shares([0, 2, 6])
        given += [samplers[0].order()[slice(*each.span(step))] for each in samplers]
    assert torch.cat(given).tolist() == samplers[0].order().tolist()
    assert [len(each) for each in given] == [4, 3, 1, 0, 2, 6, 0, 2, 5]


@pytest.mark.parametrize("comm", ["local:8", "auto:local"])
def test_adaptive_shares_refuse_local_steps(monkeypatch: pytest.MonkeyPatch, comm: str) -> None:
    monkeypatch.setenv("DDP_SLURM_COMM", comm)
    with pytest.raises(DdpSlurmError, match=f"--comm {comm} weights the ranks' parameters"):
        check_adaptive(nn.Linear(2, 2))


def test_adaptive_shares_refuse_sync_batchnorm() -> None:
    with pytest.raises(DdpSlurmError, match="SyncBatchNorm wait for each other"):
        check_adaptive(nn.Sequential(nn.SyncBatchNorm(2)))
