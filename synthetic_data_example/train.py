"""A small network on synthetic data, on any GPUs or CPUs: ten seconds to see that all works.

README.md has the commands.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from ddp_slurm.examples.arguments import add_arguments, number_of, print_result, trainer_config
from ddp_slurm.examples.models import TinyMlp
from ddp_slurm.examples.synthetic import synthetic_classes
from ddp_slurm.training import ResidentTensors, Trainer, init_distributed

TEST_SAMPLES = 1024

parser = argparse.ArgumentParser(description=__doc__)
add_arguments(parser, default_lr=0.2)
parser.add_argument("--samples", type=number_of(1), default=4096, help="of the training set")
arguments = parser.parse_args()

with init_distributed() as world:
    inputs, classes = synthetic_classes(arguments.samples + TEST_SAMPLES, seed=arguments.seed)
    train_data = ResidentTensors(inputs[:-TEST_SAMPLES], classes[:-TEST_SAMPLES], world.device)
    eval_data = ResidentTensors(inputs[-TEST_SAMPLES:], classes[-TEST_SAMPLES:], world.device)

    torch.manual_seed(arguments.seed)
    model = TinyMlp().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    config = trainer_config(arguments, world, default_global_batch=256)
    trainer = Trainer(world, model, optimizer, cross_entropy, train_data, eval_data, config)
    print_result(world, trainer.train())
