"""The examples' models."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TinyMlp(nn.Module):
    """Two layers, for synthetic data: (n, features) to (n, classes)."""

    def __init__(self, features: int = 32, classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut past them.

    Source: He et al. 2015, arXiv:1512.03385, basic block.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(inputs)), inplace=True)
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(inputs), inplace=True)


class CifarResNet(nn.Module):
    """A ResNet for images of (n, 3, 32, 32).

    Args:
        blocks: residual blocks of each stage; (2, 2, 2, 2) with width 64 is ResNet-18 in the form
            usual for CIFAR-10.
        width: channels of the first stage; each stage doubles them and halves the image.
        classes: outputs.
    """

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            next_channels = width * 2**stage
            for i in range(count):
                halves_image = stage > 0 and i == 0
                stride = 2 if halves_image else 1
                stages.append(ResidualBlock(channels, next_channels, stride))
                channels = next_channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


class Residual(nn.Module):
    """The inputs, and what ``inner`` makes of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.inner(inputs)
        return outputs


class Scaled(nn.Module):
    """Outputs in smaller steps: a short training with a high learning rate needs them."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class MirroredTest(nn.Module):
    """In evaluation the mean of a network's outputs for an image and for its mirror image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.network(images)
        if self.training:
            return outputs
        mirrored: Tensor = self.network(images.flip(-1))
        return (outputs + mirrored) / 2


def resnet9(classes: int = 10) -> nn.Sequential:
    """6.6 million parameters in eight convolutions: learns CIFAR-10 in a few seconds on a GPU.

    Source: David Page 2018, "How to train your ResNet", with its scale of 1/8 for the outputs. The
    pooling comes before the normalisation, which then has a quarter of the work.
    """
    return nn.Sequential(
        _convolution(3, 64),
        _convolution(64, 128, pool=True),
        Residual(nn.Sequential(_convolution(128, 128), _convolution(128, 128))),
        _convolution(128, 256, pool=True),
        _convolution(256, 512, pool=True),
        Residual(nn.Sequential(_convolution(512, 512), _convolution(512, 512))),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, classes, bias=False),
        Scaled(1 / 8),
    )


def _convolution(channels_in: int, channels: int, *, pool: bool = False) -> nn.Sequential:
    """3x3, of the same size or half of it, normalised."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
        nn.MaxPool2d(2) if pool else nn.Identity(),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


def resnet18(classes: int = 10) -> CifarResNet:
    """ResNet-18 for 32x32 images: 11.2 million parameters."""
    return CifarResNet((2, 2, 2, 2), 64, classes)


def small_resnet(classes: int = 10) -> CifarResNet:
    """78 thousand parameters: learns CIFAR-10 on a few CPU cores too."""
    return CifarResNet((1, 1, 1), 16, classes)


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 for images of (n, 3, 32, 32) with ReLU and maximum pooling: 62 thousand parameters.

    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition".
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def to_channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions in the memory layout that tensor cores are fast with.

    A 1x1 kernel has the same bytes in both layouts, so torch would leave its strides as they are.
    Its gradient comes with those of channels_last, and DDP copies and warns where they differ.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4:
            _, channels, height, width = parameter.shape
            strides = (channels * height * width, 1, width * channels, channels)
            values = parameter.data.contiguous(memory_format=torch.channels_last)
            parameter.data = values.as_strided(parameter.shape, strides)
    return model
