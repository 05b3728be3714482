"""What ``ddp-slurm measure`` runs without a command: a ResNet on random images of CIFAR-10's size.

ResNet-18 on GPUs; on CPUs, where it would take minutes, a small one.
"""

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import ResidentTensors, Trainer, TrainerConfig, init_distributed

IMAGES = 512


def main() -> None:
    """Returns only where the job is not one of ``ddp-slurm measure``: after one epoch."""
    with init_distributed() as world:
        has_gpu = world.device.type == "cuda"
        model = to_channels_last(resnet18() if has_gpu else small_resnet()).to(world.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        images = torch.randn(IMAGES, 3, 32, 32)
        data = ResidentTensors(images, torch.arange(IMAGES) % 10, world.device)
        config = TrainerConfig(global_batch=8 * world.world_size, total_epochs=1)
        Trainer(world, model, optimizer, cross_entropy, data, config=config).train()


if __name__ == "__main__":
    main()
