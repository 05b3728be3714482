"""Losses whose mean is not over samples: the gradient is that of one process with all of them."""

import functools
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import (
    BalancedSampler,
    Trainer,
    init_distributed,
    no_sample_loss,
    weighted_loss_factor,
    wrap_model,
)
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

from .workers import CLASSES, FEATURES, flat
from .worlds import run_world

SHARES = (5, 1, 8)
CLASS_WEIGHTS = torch.tensor([0.1, 5.0, 1.0, 0.0], dtype=torch.float64)
TOKENS = 6


def make_tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, tokens, features); targets (samples, tokens), some of them ignored (-100).

    The first samples of the order have many ignored tokens, and two have nothing else.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (samples, TOKENS), generator=generator)
    ignored = (
        torch.rand(samples, TOKENS, generator=generator) < torch.linspace(1, 0, samples)[:, None]
    )
    return inputs, torch.where(ignored, -100, targets)


class TokenModel(nn.Module):
    """(n, tokens, features) to (n, classes, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs.transpose(1, 2)


def masked_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own: the mean over the targets that are not ignored."""
    counted = targets != -100
    return ((outputs.mean(dim=1) - targets) ** 2 * counted).sum() / counted.sum()


def count_of_targets(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


LOSSES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "function": (F.cross_entropy, {}),
    "module": (nn.CrossEntropyLoss(), {}),
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), {}),
    "ignored class": (functools.partial(F.cross_entropy, ignore_index=2), {}),
    "smoothing": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.2), {}),
    "own": (masked_square, {"target_weight": count_of_targets}),
}


def data_for(name: str) -> TensorDataset:
    inputs, targets = make_tokens(40)
    if name == "ignored class":  # -100 would be a wrong class then
        targets = targets.clamp(min=0)
    return TensorDataset(inputs, targets)


def train_all(pipe: Connection) -> dict[str, tuple[Tensor, float, float]]:
    """Of each loss: parameters after an epoch, evaluation loss, recorded training loss."""
    found = {}
    with init_distributed() as world:
        for name, (loss_function, settings) in LOSSES.items():
            model = TokenModel()
            records: list[dict[str, Any]] = []
            trainer = Trainer(
                world,
                model,
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                loss_function,
                data_for(name),
                data_for(name),
                global_batch=sum(SHARES),
                shares=SHARES,
                micro_batch=3,
                total_epochs=1,
                quiet=True,
                recorders=[records.append],
                **settings,
            )
            metrics = trainer.train().metrics
            recorded = records[0]["loss"] if records else 0.0
            found[name] = flat(model.parameters()), metrics["loss"], recorded
    return found


def train_alone(name: str) -> tuple[Tensor, float, float]:
    loss_function, _ = LOSSES[name]
    data, model = data_for(name), TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, weights = [], []
    for order in BalancedSampler(data, [sum(SHARES)], 0):
        inputs, targets = data[order]
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        weights.append(
            WeightedLoss(loss_function, LOSSES[name][1].get("target_weight")).weight(targets)
        )
        losses.append(loss.detach() * weights[-1])
    inputs, targets = data[:]
    recorded = (sum(losses) / sum(weights)).item()
    return flat(model.parameters()), loss_function(model(inputs), targets).item(), recorded


def test_trainer_with_weighted_means_equals_one_process(tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(tmp_path, (1, 2), train_all)):
        for name, (parameters, evaluation, recorded) in found.items():
            expected, loss, training_loss = train_alone(name)
            torch.testing.assert_close(parameters, expected, rtol=1e-7, atol=1e-9, msg=name)
            assert evaluation == pytest.approx(loss, rel=1e-7), name
            if rank == 0:
                assert recorded == pytest.approx(training_loss, rel=1e-7), name


def own_loop(pipe: Connection, is_exact: bool) -> Tensor:
    """A loop without the Trainer, in which one rank has nothing but ignored targets at first."""
    with init_distributed() as world:
        data, model = data_for("function"), TokenModel()
        ddp = wrap_model(model, world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sampler = BalancedSampler(data, SHARES, world.rank, shuffle=False)
        for step, order in enumerate(sampler):
            inputs, targets = data[order]
            tokens = int((targets != -100).sum())
            factor = weighted_loss_factor(tokens, world.control)
            if not is_exact:
                factor = sampler.loss_weight(step)
            optimizer.zero_grad()
            if tokens:
                (F.cross_entropy(ddp(inputs), targets) * factor).backward()
            else:
                no_sample_loss(ddp).backward()
            optimizer.step()
        return flat(model.parameters())


@pytest.mark.parametrize("is_exact", [True, False])
def test_weighted_loss_factor_in_a_loop_of_its_own(tmp_path: Path, is_exact: bool) -> None:
    data, model = data_for("function"), TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for order in BalancedSampler(data, [sum(SHARES)], 0, shuffle=False):
        inputs, targets = data[order]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    expected = flat(model.parameters())
    for found in run_world(tmp_path, (1, 2), own_loop, is_exact):
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < 1e-9 if is_exact else error > 1e-2


@pytest.mark.parametrize(
    ("loss_function", "targets"),
    [
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), torch.tensor([0, 1, 1, 2, 3])),
        (nn.CrossEntropyLoss(), torch.tensor([0, -100, 1, 2, 3])),
        (nn.NLLLoss(weight=CLASS_WEIGHTS, ignore_index=1), torch.tensor([0, 1, 1, 2, 3])),
        (functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS), torch.tensor([0, 1, 1, 2, 3])),
        (nn.CrossEntropyLoss(), torch.rand(5, CLASSES, dtype=torch.float64)),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), torch.rand(5, CLASSES, dtype=torch.float64)),
        (F.mse_loss, torch.rand(5, CLASSES, dtype=torch.float64)),
    ],
)
def test_weighted_loss_divides_by_what_torch_divides_by(
    loss_function: Callable[..., Tensor], targets: Tensor
) -> None:
    outputs = torch.randn(5, CLASSES, dtype=torch.float64)
    loss = WeightedLoss(loss_function)
    value, factor = loss.value_and_factor(outputs, targets)
    mean = value * factor / loss.weight(targets)
    torch.testing.assert_close(mean, loss_function(outputs, targets))
    loss.check(outputs, targets)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each sample against all others of the batch."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


@pytest.mark.parametrize(
    ("loss_function", "name"),
    [
        (lambda outputs, targets: F.cross_entropy(outputs, targets, CLASS_WEIGHTS), "<lambda>"),
        (contrastive, "contrastive"),
        (lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"), "<lambda>"),
    ],
)
def test_weighted_loss_check_refuses_an_unknown_mean(
    loss_function: Callable[..., Tensor], name: str
) -> None:
    outputs = torch.randn(6, CLASSES, dtype=torch.float64)
    state = torch.get_rng_state()
    with pytest.raises(DdpSlurmError, match=f"the loss function {name} is not a mean over the sam"):
        WeightedLoss(loss_function).check(outputs, torch.tensor([0, 1, 2, 0, 0, 0]))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_weighted_loss_refuses_another_reduction(reduction: str) -> None:
    with pytest.raises(DdpSlurmError, match=f"CrossEntropyLoss has reduction='{reduction}'"):
        WeightedLoss(nn.CrossEntropyLoss(reduction=reduction))


def refused(pipe: Connection, check_loss: bool) -> str:
    with init_distributed() as world:
        model = TokenModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = data_for("own")
        settings = {"global_batch": 14, "total_epochs": 1, "quiet": True, "check_loss": check_loss}
        trainer = Trainer(world, model, optimizer, masked_square, data, **settings)
        try:
            trainer.train()
        except DdpSlurmError as error:
            return str(error)
        return "trained"


@pytest.mark.parametrize("check_loss", [True, False])
def test_trainer_refuses_an_unknown_weighted_mean(tmp_path: Path, check_loss: bool) -> None:
    [found] = run_world(tmp_path, (1,), refused, check_loss)
    if check_loss:
        assert "the loss function masked_square is not a mean over the samples" in found
        assert "TrainerConfig(target_weight=...)" in found
    else:
        assert found == "trained"
