"""The networks of the examples."""

import torch

from ddp_slurm.examples.models import lenet, resnet18, small_resnet, to_channels_last


def test_channels_last_gradients_have_the_same_strides() -> None:
    """Where they differ DDP copies each gradient, and warns."""
    model = to_channels_last(small_resnet())
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert any(parameter.shape[2:] == (1, 1) for parameter in model.parameters())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


def test_channels_last_changes_no_value() -> None:
    torch.manual_seed(0)
    plain = small_resnet()
    torch.manual_seed(0)
    laid_out = to_channels_last(small_resnet())
    for before, after in zip(plain.parameters(), laid_out.parameters(), strict=True):
        assert torch.equal(before, after)


def test_models_have_the_documented_sizes() -> None:
    for make, millions in ((resnet18, 11.2), (small_resnet, 0.078), (lenet, 0.062)):
        assert (
            round(sum(p.numel() for p in make().parameters()) / 1e6, 3 if millions < 1 else 1)
            == millions
        )
