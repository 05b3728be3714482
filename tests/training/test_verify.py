"""``verify`` in Python: the gradient on uneven shares beside that of the whole batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training import verify

WEIGHTS = torch.tensor([1.0, 9.0])


def batches(samples: int = 14) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(samples, 6), torch.randint(0, 2, (samples,))) for _ in range(2)]


def net(layer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("layer", "loss", "cause"),
    [
        (nn.Tanh(), cross_entropy, None),
        (nn.GroupNorm(2, 8), nn.CrossEntropyLoss(label_smoothing=0.1), None),
        (nn.Tanh(), nn.CrossEntropyLoss(WEIGHTS), "not a mean over the samples"),
        (nn.Tanh(), nn.CrossEntropyLoss(reduction="sum"), "a sum, a mean over tokens"),
        (nn.Dropout(), cross_entropy, "Dropout draws other masks"),
        (nn.BatchNorm1d(8), cross_entropy, "SyncBatchNorm uses those of the whole batch"),
    ],
    ids=["mean", "smoothed", "class weights", "sum", "dropout", "batch norm"],
)
def test_verify_names_the_likely_cause(
    layer: nn.Module, loss: Callable[..., Tensor], cause: str | None
) -> None:
    model, data = net(layer), batches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    check = verify(model, loss, data)
    assert set(check.differences) >= {"0", "2"}
    assert check.steps == 2
    assert check.is_exact is (cause is None)
    assert (cause or "the same gradient in 2 steps") in str(check)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_verify_takes_nested_batches_and_shares_of_nothing() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, inputs: dict[str, Any]) -> Tensor:
            return inputs["scale"] * self.layer(inputs["parts"][0])

    data = [({"parts": [x], "scale": 2.0}, y) for x, y in batches(3)]
    check = verify(Model(), cross_entropy, data, shares=[0, 1, 9], steps=1)
    assert check.steps == 1
    assert check.differences["layer"] < 1e-6


@pytest.mark.parametrize(
    ("data", "words"),
    [([], "data has no batch"), ([(torch.ones(3, 6), torch.ones(4))], r"got sizes \[3, 4\]")],
)
def test_verify_refuses_data_that_it_cannot_divide(data: Any, words: str) -> None:
    with pytest.raises(DdpSlurmError, match=words):
        verify(net(nn.Tanh()), cross_entropy, data)
