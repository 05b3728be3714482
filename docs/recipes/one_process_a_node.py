"""One process a node that drives all its GPUs: DataParallel in it, one all-reduce between nodes.

ddp-slurm submit --ranks node --global-batch-size 112 -- python docs/recipes/one_process_a_node.py

For code that wants all GPUs in one process. One process a GPU is faster: here one Python thread
feeds all of them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_slurm.training import BalancedSampler, init_distributed

with init_distributed() as world:
    inputs = torch.linspace(0, 1, 1120).reshape(-1, 1)
    data = TensorDataset(inputs, 3 * inputs + 1)
    torch.manual_seed(0)  # the same start on every rank; nothing else sends the parameters around
    network = nn.Linear(1, 1).to(world.device)
    model = nn.DataParallel(network)  # on all visible GPUs; on a CPU it is the network itself
    # In proportion to the GPUs of each node, by a file of speeds, or measured: as the job asks.
    shares = world.shares(112, model, mse_loss, data)
    sampler = BalancedSampler(data, shares, world.rank)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)

    for epoch in range(15):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(DataLoader(data, batch_sampler=sampler)):
            optimizer.zero_grad()
            loss = mse_loss(model(x.to(world.device)), y.to(world.device))
            # loss_weight makes the mean over the ranks the mean over the samples
            (loss * sampler.loss_weight(step) / world.world_size).backward()
            for parameter in network.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    weight, bias = (p.item() for p in network.parameters())
    print(
        f"RESULT rank={world.rank} world={world.world_size} weight={weight:.6f} bias={bias:.6f}",
        flush=True,
    )
