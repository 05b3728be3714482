"""A loop of your own: DistributedDataParallel, and a sampler that gives each rank its share.

ddp-slurm submit --global-batch-size 112 --balance speeds.yaml -- python docs/recipes/sampler.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.training import BalancedSampler, init_distributed, no_sample_loss

with init_distributed() as world:
    inputs = torch.linspace(0, 1, 1120).reshape(-1, 1)
    data = TensorDataset(inputs, 3 * inputs + 1)
    torch.manual_seed(0)
    line = nn.Linear(1, 1).to(world.device)
    # By the plan of the job, or measured here with --balance measured.
    shares = world.shares(112, line, mse_loss, data)
    # Every sample once an epoch; each rank takes its share of every global batch of 112.
    sampler = BalancedSampler(data, shares, world.rank)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate)

    optimizer = torch.optim.SGD(line.parameters(), lr=0.5)
    model = world.wrap(line, optimizer, shares)  # DDP, exchanging as --comm says
    seen = 0
    for epoch in range(15):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            seen += len(x)
            optimizer.zero_grad()
            if len(x):
                # DDP takes the mean over ranks; the weight makes it the mean over samples.
                outputs = model(x.to(world.device))
                loss = mse_loss(outputs, y.to(world.device)) * sampler.loss_weight(step)
            else:  # a card so slow that its share is 0
                loss = no_sample_loss(model)
            loss.backward()
            optimizer.step()
    world.average()  # needed with --comm local:STEPS only: all ranks get the same parameters
    weight, bias = (p.item() for p in model.parameters())
    print(
        f"RESULT rank={world.rank} world={world.world_size} "
        f"weight={weight:.6f} bias={bias:.6f} seen={seen}",
        flush=True,
    )
