"""A ResNet on CIFAR-10, on all the GPUs you own, however uneven.

    python -m ddp_slurm.submit --backend local --cluster cluster.yaml -- python train.py 10 1 --data cifar10.npz
    sbatch test.sh                                                                # the same through Slurm
    torchrun --nproc-per-node 2 train.py 10 1 --model resnet18 --batch-size 512   # any env:// launcher

The images come from torchvision's folder (cifar-10-batches-py in --data) or an .npz archive. Fetch them once, before
the job: ranks that download into one folder break each other's files.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.arguments import add_arguments, global_batch_size, number_of, real_number
from ddp_slurm.examples.models import resnet18, small_resnet, to_channels_last
from ddp_slurm.training import Snapshot, Trainer, init_distributed
from ddp_slurm.training.data import ResidentImages, load_cifar10
from ddp_slurm.training.trainer.report import say

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
add_arguments(parser, default_lr=0.2)
parser.add_argument(
    "--data", default="data", metavar="PATH", help="folder or .npz archive of CIFAR-10"
)
parser.add_argument(
    "--limit", type=number_of(1), metavar="N", help="only the first N images of each split"
)
parser.add_argument("--model", choices=("small", "resnet18"), default="small")
parser.add_argument("--weight-decay", type=real_number(zero=True), default=5e-4)
arguments = parser.parse_args()

with init_distributed() as world:
    # 184 MB for all 60,000 images as uint8: they live on the GPU, and no loader can be too slow.
    train_images, train_labels, test_images, test_labels = load_cifar10(
        arguments.data, arguments.limit
    )
    train_data = ResidentImages(
        train_images, train_labels, world.device, augment=True, seed=arguments.seed
    )
    eval_data = ResidentImages(test_images, test_labels, world.device)

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(arguments.seed)
    model = to_channels_last(resnet18() if arguments.model == "resnet18" else small_resnet()).to(
        world.device
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=arguments.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=arguments.weight_decay,
        fused=world.device.type
        == "cuda",  # one kernel for all parameters: here the GPU waits for the CPU
    )
    # The same global batch on any number of ranks, so the learning rate holds for all of them.
    global_batch = global_batch_size(arguments, world, default=512)
    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        train_data,
        eval_data,
        global_batch=global_batch,
        micro_batch=arguments.micro_batch_size,
        total_epochs=arguments.total_epochs,
        save_every_epochs=arguments.save_every,
        precision=arguments.precision,
        clip_norm=arguments.clip_norm,
        snapshot=Snapshot(arguments.snapshot, world.control),
        metrics_path=arguments.metrics,
        seed=arguments.seed,
    )

    def warm_up_then_fall(step: int) -> float:
        done = trainer.progress  # not by steps: a resumed run may have another global batch
        return min(0.1 + 4.5 * done, 1.25 * (1 - done))

    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_fall)
    result = trainer.train()
    if world.rank == 0 and result.finished:
        metrics = result.metrics
        say(
            f"finished: step {result.step}, loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}"
        )
