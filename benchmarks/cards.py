"""E of uneven cards: images a second of the job / the sum of the cards alone at their shares.

    torchrun --nproc-per-node 2 -m benchmarks.cards
    torchrun --nproc-per-node 2 -m benchmarks.cards --models gpt --ratios 3 --sizes 64 --steps 200
    # tiny, on CPUs (gloo):
    export OMP_NUM_THREADS=1
    torchrun --nproc-per-node 2 -m benchmarks.cards --ratios 2 --sizes 8 --steps 12

Two cards; the second one does the work of each block ``--ratios`` times. The shares are measured.
``--sizes`` are samples a rank on average. A card whose share is 0 counts with its speed at the
equal share, and with ``--graphs auto`` each card with the faster of both ways. The equal-sum test
at the end trains an uneven pair (2 and 6 times the work) and an even one (3 and 3 times): both have
the same sum of speeds.
"""

import argparse
import os

import torch

from benchmarks.workloads import NAMES, Workload, rate_alone, rate_as_graph, rate_of, trainer_of
from ddp_slurm.console import table
from ddp_slurm.job_env import BALANCE
from ddp_slurm.training import World, init_distributed
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.memory.out_of_memory import free_memory

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--models", default=",".join(NAMES))
parser.add_argument("--ratios", default="1,2,3,5", help="how many times slower the second card is")
parser.add_argument("--sizes", default="1024,512,256,64", help="samples a rank on average")
parser.add_argument("--steps", type=int, default=60, help="of each measurement")
parser.add_argument("--graphs", default="off", choices=("off", "auto"), help="as of the Trainer")
parser.add_argument("--no-equal-sum", action="store_true", help="leave the last test out")


def run(
    world: World, work: Workload, times: tuple[int, int], size: int, arguments: argparse.Namespace
) -> tuple[list[int], float, float]:
    """Shares, images a second of both, and the sum of the cards alone."""
    own = times[world.rank]
    steps, batch = arguments.steps, 2 * size
    model = work.model(own).to(world.device)
    options = {"graphs": arguments.graphs, "log_every_steps": max(1, steps // 6)}
    trainer = trainer_of(world, work, model, batch, steps, **options)
    shares = list(trainer.sampler.shares)
    both = rate_of(world, trainer)
    del trainer, model
    free_memory(world.device)
    share = shares[world.rank] or size
    model = work.model(own).to(world.device)
    alone = rate_alone(world, work, model, share, share, steps // 2)
    if arguments.graphs == "auto":
        alone = max(alone, rate_as_graph(world, work, model, share, steps // 2))
    free_memory(world.device)
    return shares, both, sum(all_gather_values(alone, world.control))


def efficiencies(world: World, arguments: argparse.Namespace) -> None:
    rows = [("model", "slower", "a rank", "shares", "images/s", "sum", "E")]
    for name in arguments.models.split(","):
        work = Workload(name, world.device.type == "cuda")
        for ratio in map(int, arguments.ratios.split(",")):
            for size in map(int, arguments.sizes.split(",")):
                shares, both, total = run(world, work, (1, ratio), size, arguments)
                figures = (f"{both:,.0f}", f"{total:,.0f}", f"{both / total:.3f}")
                split = f"{shares[0]} : {shares[1]}"
                rows.append((name, f"1:{ratio}", str(size), split, *figures))
    if world.rank == 0:
        print(table(rows), flush=True)


def equal_sum(world: World, arguments: argparse.Namespace) -> None:
    size = int(arguments.sizes.split(",")[0])
    for name in arguments.models.split(","):
        work = Workload(name, world.device.type == "cuda")
        shares, uneven, _ = run(world, work, (2, 6), size, arguments)
        _, even, _ = run(world, work, (3, 3), size, arguments)
        if world.rank == 0:
            split = f"{shares[0]} : {shares[1]}"
            print(
                f"{name}: uneven pair {uneven:,.0f} ({split}), even pair of the same sum", end=" "
            )
            print(f"{even:,.0f} images/s: {uneven / even:.3f}", flush=True)


def main() -> None:
    arguments = parser.parse_args()
    os.environ[BALANCE] = "measured"
    with init_distributed() as world:
        if world.world_size != 2:
            parser.error(f"expected 2 ranks, got {world.world_size}")
        if world.rank == 0:
            kind = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
            print(f"2 x {kind}, graphs {arguments.graphs}, {arguments.steps} steps", flush=True)
        efficiencies(world, arguments)
        if not arguments.no_equal_sum:
            equal_sum(world, arguments)


if __name__ == "__main__":
    main()
