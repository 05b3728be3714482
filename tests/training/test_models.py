"""The networks of the examples."""

import torch

from ddp_slurm.examples.models import (
    MirroredTest,
    lenet,
    resnet9,
    resnet18,
    small_resnet,
    to_channels_last,
)


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
    sizes = ((resnet18, 11.2), (resnet9, 6.6), (small_resnet, 0.078), (lenet, 0.062))
    for make, millions in sizes:
        assert (
            round(sum(p.numel() for p in make().parameters()) / 1e6, 3 if millions < 1 else 1)
            == millions
        )


def test_mirrored_test_averages_in_evaluation_only() -> None:
    torch.manual_seed(0)
    network = small_resnet().eval()
    model = MirroredTest(network).eval()
    images = torch.randn(2, 3, 32, 32)
    both = (network(images) + network(images.flip(-1))) / 2
    assert torch.equal(model(images), both)
    assert torch.equal(model(images), model(images.flip(-1)))
    model.training = True  # the network itself stays as it is: BatchNorm would change
    assert torch.equal(model(images), network(images))


def test_resnet9_learns_a_few_images() -> None:
    torch.manual_seed(0)
    model = resnet9()
    images, labels = torch.randn(10, 3, 32, 32), torch.arange(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(6):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
