"""A rank that runs out of memory in a step goes on with it, and the gradient stays exact."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.training.memory.halving import Passes
from ddp_slurm.training.memory.search import MemoryTooSmall

from .memory_worker import Shortage, Stingy, train_through, trained_alone
from .trainer_worker import relative_error
from .worlds import run_world, world

SMALL_BUCKETS = {"DDP_SLURM_BUCKET_BYTES": "600"}
"""A bucket for each layer of the network, so that some are summed when backward fails."""
SECOND_STEP = 3
"""Rank 1 takes each step in three passes of four samples; the first step has the passes 0 to 2."""


def cases() -> list[Shortage]:
    """In the first, the middle and the last micro-batch, and in one that is all of the share."""
    found = [
        Shortage(1, fails_in, SECOND_STEP + number, micro_batch=4)
        for fails_in in ("forward", "backward")
        for number in range(3)
    ]
    for fails_in in ("forward", "backward"):
        found += [Shortage(1, fails_in, 1, micro_batch=12, layer=layer) for layer in (1, 3, 5)]
    found += [
        Shortage(0, "backward", 1, micro_batch=12, options={"clip_norm": 0.1}),
        Shortage(0, "backward", 0, micro_batch=100, limit=1),
    ]
    return found


def test_gradient_is_exact_when_memory_runs_out(tmp_path: Path) -> None:
    shortages = cases()
    found = run_world(tmp_path, (1, 1), train_through, shortages, environ=SMALL_BUCKETS)
    for number, shortage in enumerate(shortages):
        outcomes = [of_rank[number] for of_rank in found]
        if not shortage.options:
            expected = trained_alone(shortage)
            for outcome in outcomes:
                assert relative_error(outcome["parameters"], expected) < 1e-12, shortage
        assert torch.equal(outcomes[0]["parameters"], outcomes[1]["parameters"]), shortage
        own = outcomes[shortage.rank]["most_at_once"]
        assert shortage.limit / 2 < own <= shortage.limit, shortage
        assert outcomes[1 - shortage.rank]["most_at_once"] == shortage.micro_batch
    log = (tmp_path / "rank1.log").read_text()
    assert "ran out of memory with 4 samples at once; goes on with 2, in the same step" in log


def test_searched_micro_batches_train_exactly(tmp_path: Path) -> None:
    """Rank 1 has room for 5 samples from the start, and its share is 12."""
    shortage = Shortage(1, "backward", 0, micro_batch="auto", limit=5)
    found = run_world(tmp_path, (1, 1), train_through, [shortage])
    assert [outcome["most_at_once"] for [outcome] in found] == [9, 4]
    for [outcome] in found:
        assert relative_error(outcome["parameters"], trained_alone(shortage)) < 1e-12
    assert "ran out of memory" not in (tmp_path / "rank1.log").read_text()


def test_a_gradient_that_counts_twice_is_noticed(tmp_path: Path) -> None:
    """The negative control: each parameter gets the gradient of the failed pass again."""
    shortage = Shortage(1, "backward", SECOND_STEP, micro_batch=4, counts_twice=True)
    [[outcome], _] = run_world(tmp_path, (1, 1), train_through, [shortage], environ=SMALL_BUCKETS)
    assert relative_error(outcome["parameters"], trained_alone(shortage)) > 1e-3


def test_a_rank_without_room_for_one_sample_ends_the_job(tmp_path: Path) -> None:
    shortage = Shortage(1, "backward", 1, micro_batch=12, limit=0)
    with world(tmp_path, (1, 1), train_through, [shortage]) as running:
        assert running.wait() == [2, 2]
        assert "rank 1 on" in running.log(1)
        assert "ran out of memory with 1 samples at once; use a smaller model" in running.log(1)


def passes_of(model: nn.Module, most: int) -> tuple[Passes, list[int]]:
    counted: list[int] = []

    def loss_of(forward: object, inputs: Tensor, targets: Tensor) -> object:
        loss = cross_entropy(forward(inputs), targets, reduction="sum")  # type: ignore[operator]
        return loss, lambda: counted.append(len(targets))

    return Passes(model, loss_of, most, "rank 0 on box"), counted  # type: ignore[arg-type]


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_batchnorm_sees_each_sample_once(fails_in: str) -> None:
    """Layers that had run keep the update by the whole micro-batch; the others get the halves'."""
    model = nn.Sequential(
        nn.BatchNorm1d(4), Stingy(5, fails_in), nn.Linear(4, 3), nn.BatchNorm1d(3)
    )
    passes, counted = passes_of(model, 100)
    inputs, targets = batch(8)
    passes.run(inputs, targets, is_last=True)
    first, last = model[0], model[3]
    assert torch.allclose(first.running_mean, 0.1 * inputs.mean(dim=0))
    assert first.num_batches_tracked == 1
    assert last.num_batches_tracked == (2 if fails_in == "forward" else 1)
    assert sum(counted) == 8, "the loss of each sample is counted once"
    assert passes.most_at_once == 4


def test_shared_and_unused_parameters_are_exact() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
            self.stingy, self.last = Stingy(1000, "backward"), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.layer(torch.tanh(self.layer(inputs)))
            outputs: Tensor = self.last(self.stingy(hidden))
            return outputs

    expected, model = Odd(), Odd()
    passes_of(expected, 100)[0].run(*batch(8), is_last=True)
    model.stingy.limit = 3
    passes_of(model, 100)[0].run(*batch(8), is_last=True)
    assert model.unused.weight.grad is None
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        if wanted.grad is not None:
            assert found.grad is not None
            torch.testing.assert_close(found.grad, wanted.grad)


def test_sync_batchnorm_cannot_be_halved_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Stingy(5), nn.SyncBatchNorm(3).eval())
    with pytest.raises(MemoryTooSmall, match="with SyncBatchNorm no rank can halve"):
        passes_of(model, 100)[0].run(*batch(8), is_last=True)


def test_other_errors_end_the_pass() -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        passes_of(model, 100)[0].run(*batch(8), is_last=True)
