"""A ResNet, or LeNet, on CIFAR-10 on all the GPUs you own, however uneven: see README.md."""

import argparse
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.arguments import (
    add_arguments,
    number_of,
    part,
    print_result,
    real_number,
    trainer_config,
)
from ddp_slurm.examples.cifar10 import MEAN, STD, load_cifar10
from ddp_slurm.examples.models import (
    MirroredTest,
    lenet,
    resnet9,
    resnet18,
    small_resnet,
    to_channels_last,
)
from ddp_slurm.job_env import JobEnv
from ddp_slurm.training import ResidentImages, Trainer, init_distributed

MODELS = {"small": small_resnet, "resnet9": resnet9, "resnet18": resnet18, "lenet": lenet}

parser = argparse.ArgumentParser(description=__doc__)
add_arguments(parser, default_lr=0.2)
parser.add_argument(
    "--data",
    default=JobEnv.from_environ().data or "data",
    metavar="PATH",
    help="folder or .npz archive of CIFAR-10; default that of the job's --dataset, else ./data",
)
parser.add_argument(
    "--limit", type=number_of(1), metavar="N", help="only the first N images of each split"
)
parser.add_argument("--model", choices=tuple(MODELS), default="small")
parser.add_argument("--weight-decay", type=real_number(zero=True), default=5e-4)
parser.add_argument("--label-smoothing", type=part, default=0.0, metavar="PART")
parser.add_argument("--mirror-test", action="store_true", help="test on mirrored images, too")
arguments = parser.parse_args()

with init_distributed() as world:
    device = world.device
    images, labels, test_images, test_labels = load_cifar10(arguments.data, arguments.limit)
    # 184 MB for all 60,000 images as uint8: they live on the GPU, and no loader can be too slow.
    train_data = ResidentImages(
        images, labels, device, mean=MEAN, std=STD, augment=True, seed=arguments.seed
    )
    eval_data = ResidentImages(test_images, test_labels, device, mean=MEAN, std=STD)

    torch.manual_seed(arguments.seed)
    network = MODELS[arguments.model]()
    if arguments.mirror_test:
        network = MirroredTest(network)
    model = to_channels_last(network).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=arguments.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=arguments.weight_decay,
        # One kernel for all parameters: the GPU would wait for the CPU here.
        fused=device.type == "cuda",
    )
    config = trainer_config(arguments, world, default_global_batch=512)
    loss = partial(cross_entropy, label_smoothing=arguments.label_smoothing)
    trainer = Trainer(world, model, optimizer, loss, train_data, eval_data, config)

    def warm_up_then_fall(step: int) -> float:
        # Not by steps: a resumed run may have another global batch.
        done = trainer.progress
        return min(0.1 + 4.5 * done, 1.25 * (1 - done))

    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_fall)
    print_result(world, trainer.train())
