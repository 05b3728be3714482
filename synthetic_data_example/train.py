"""A small network on made-up data, on however many uneven GPUs or CPUs there are: 10 seconds to see that it all works.

python -m ddp_slurm.submit --backend local --cluster cluster.yaml -- python train.py 5 1
sbatch test.sh                                                        # the same through Slurm
torchrun --nproc-per-node 2 train.py 5 1 --global-batch-size 128      # any env:// launcher
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.arguments import add_arguments, global_batch_size, number_of
from ddp_slurm.examples.models import TinyMlp
from ddp_slurm.training import Snapshot, Trainer, init_distributed
from ddp_slurm.training.data import ResidentTensors, synthetic_classes
from ddp_slurm.training.trainer.report import say

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
add_arguments(parser, default_lr=0.2)
parser.add_argument("--samples", type=number_of(1), default=4096, help="of the training set")
arguments = parser.parse_args()

with init_distributed() as world:
    inputs, classes = synthetic_classes(arguments.samples + 1024, seed=arguments.seed)
    train_data = ResidentTensors(inputs[:-1024], classes[:-1024], world.device)
    eval_data = ResidentTensors(inputs[-1024:], classes[-1024:], world.device)

    torch.manual_seed(arguments.seed)
    model = TinyMlp().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    trainer = Trainer(
        world,
        model,
        optimizer,
        cross_entropy,
        train_data,
        eval_data,
        # The same global batch on any number of ranks, so the learning rate holds for all of them.
        global_batch=global_batch_size(arguments, world, default=256),
        micro_batch=arguments.micro_batch_size,
        total_epochs=arguments.total_epochs,
        save_every_epochs=arguments.save_every,
        precision=arguments.precision,
        clip_norm=arguments.clip_norm,
        snapshot=Snapshot(arguments.snapshot, world.control),
        metrics_path=arguments.metrics,
        seed=arguments.seed,
    )
    result = trainer.train()
    if world.rank == 0 and result.finished:
        metrics = result.metrics
        say(
            f"finished: step {result.step}, loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}"
        )
