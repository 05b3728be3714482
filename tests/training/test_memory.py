"""The largest micro-batch: what is found, and that a search leaves nothing behind."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ddp_slurm.training.memory import micro_batch, search
from ddp_slurm.training.memory.later import bytes_of_later, bytes_of_new_state
from ddp_slurm.training.memory.out_of_memory import is_out_of_memory
from ddp_slurm.training.memory.search import MemoryTooSmall, largest_micro_batch
from ddp_slurm.training.uneven.calibrate import TrainingStep

from .memory_worker import Stingy, found_in_world
from .worlds import run_world

CPU = torch.device("cpu")


def network(limit: int, *, fails_in: str = "forward") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.5),
        Stingy(limit, fails_in),
        nn.Linear(4, 2),
    )


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingStep:
    def batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3), torch.randn(count, 2)

    return TrainingStep(model, mse_loss, batch, CPU, optimizer=optimizer)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize(
    ("limit", "most", "at_least", "at_most"),
    [
        (1000, 300, 300, 300),  # the whole share fits
        (247, 4096, 208, 222),  # 0.9 of 232 to 247
        (5, 4096, 4, 5),
        (2, 4096, 2, 2),
        (1, 1, 1, 1),
    ],
)
def test_search_finds_most_of_what_fits(
    fails_in: str, limit: int, most: int, at_least: int, at_most: int
) -> None:
    if most == 1:  # BatchNorm has no variance of one sample
        model = nn.Sequential(nn.Linear(3, 2), Stingy(limit, fails_in))
    else:
        model = network(limit, fails_in=fails_in)
    assert at_least <= largest_micro_batch(step_of(model), most) <= at_most


def test_search_takes_few_trials() -> None:
    model = network(247)
    calls: list[int] = []
    model[3].register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    largest_micro_batch(step_of(model), 4096)
    assert calls == [4096, 2048, 1024, 512, 256, 128, 192, 224, 240, 248]


def test_search_does_not_let_cudnn_compare_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen: list[bool] = []
    model = network(20)
    model[3].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    largest_micro_batch(step_of(model), 64)
    assert set(seen) == {False}
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_search_leaves_everything_as_it_was(fails_in: str) -> None:
    model = network(20, fails_in=fails_in)
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters())
    mse_loss(model(torch.randn(6, 3)), torch.randn(6, 2)).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = everything(model, optimizer)
    largest_micro_batch(step_of(model, optimizer), 64)
    after = everything(model, optimizer)
    assert before == after
    assert [module.training for module in model] == [True, False, True, True, True]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.state_dict().values(), *states, *(p.grad for p in model.parameters())]
    return [[t.tolist() for t in tensors], torch.get_rng_state().tolist(), random.getstate()]


def test_search_passes_other_errors_on() -> None:
    def fails(inputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("shapes do not match")

    step = TrainingStep(network(10), fails, step_of(network(10)).get_batch, CPU)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        largest_micro_batch(step, 8)


def test_search_ends_where_nothing_fits() -> None:
    with pytest.raises(MemoryTooSmall, match=r"2 samples at once do not fit the memory of cpu"):
        largest_micro_batch(step_of(network(1)), 64)


def test_search_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCH_SECONDS", -1.0)
    assert largest_micro_batch(step_of(network(1000)), 64) == 64
    assert largest_micro_batch(step_of(network(20)), 64) == 14  # 0.9 of 16


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.LBFGS(p), 2),  # needs a closure: taken for Adam
    ],
)
def test_room_for_optimizer_state_that_comes_later(make: object, copies: int) -> None:
    model = nn.Linear(10, 10)
    optimizer = make(model.parameters())  # type: ignore[operator]
    size = 4 * 110
    assert bytes_of_new_state(optimizer) == copies * size
    assert bytes_of_later(model, optimizer) == (copies + 2) * size
    assert not optimizer.state
    if copies and not isinstance(optimizer, torch.optim.LBFGS):
        model(torch.randn(2, 10)).sum().backward()
        optimizer.step()
        assert bytes_of_new_state(optimizer) == 0


def test_out_of_memory_errors_are_known() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_micro_batches_of_a_world(tmp_path: Path) -> None:
    """Rank 0 has room for all, rank 1 for 20; the one with a known limit does not search."""
    found = run_world(tmp_path, (1, 1), found_in_world, (1000, 20))
    assert [each["plain"] for each in found] == [64, 18]
    assert [each["own loop"] for each in found] == [64, 18]
    assert [each["known"] for each in found] == [12, 12]
    assert [each["other model"] for each in found] == [64, 18]
    text = "micro-batch, the most samples that fit the memory at once: rank 1: 18; found in "
    assert text in (tmp_path / "rank0.log").read_text()
    assert "rank 1: 12; found in 0.0 s" in (tmp_path / "rank0.log").read_text()


def test_micro_batch_on_cpus_is_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "all_gather_values", lambda value, control: [value])
    monkeypatch.setattr(micro_batch.dist, "get_rank", lambda control: 0)
    monkeypatch.setenv("DDP_SLURM_KNOWN_LIMITS", json.dumps(["Sequential", "float32", {"cpu": 3}]))
    assert micro_batch.find_micro_batch(step_of(network(1)), 64, None) == 64  # type: ignore[arg-type]
