"""The measurement itself: every rank takes part, rank 0 writes the file, and the job is done."""

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ddp_slurm import __version__
from ddp_slurm.curve import Curve
from ddp_slurm.errors import counted
from ddp_slurm.files import write_whole
from ddp_slurm.job_env import MEASURED_RANKS, JobEnv, JobEnvError
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.measure.cards import SIZES, CardSpeed, measure_card
from ddp_slurm.training.measure.links import measure_links, rings_of
from ddp_slurm.training.measure.overlap import measure_hidden
from ddp_slurm.training.measure.speeds_file import RankSpeed, speeds_text
from ddp_slurm.training.memory.micro_batch import find_micro_batch
from ddp_slurm.training.process_group.facts import RankFacts
from ddp_slurm.training.uneven.calibrate import TrainingStep, card_name


def measure_and_leave(
    step: TrainingStep,
    ranks: Sequence[RankFacts],
    control: dist.ProcessGroup,
    most: int | None = None,
) -> NoReturn:
    """Measure, let rank 0 write the file that the job names, and end this process with status 0.

    All ranks call it.

    Args:
        step: on this rank.
        ranks: the facts of all.
        control: a gloo group over all ranks.
        most: the most samples that are run at once; None has no limit.
    """
    own = _measured_card(step, control, most)
    everyone = all_gather_values([own.points, own.max_batch, card_name(step.device)], control)
    speeds = [CardSpeed([(n, t) for n, t in points], most) for points, most, _ in everyone]
    cards = [card for _, _, card in everyone]
    rings = rings_of([fact.node_rank for fact in ranks])
    links = measure_links(rings, step.device, control)
    size = gradient_bytes(step.model)
    curves = [Curve.through(speed.points) for speed in speeds]
    sizes = set.intersection(*({size for size, _ in speed.points} for speed in speeds))
    hidden = measure_hidden(step, curves, sorted(sizes), size)
    if dist.get_rank(control) == 0:
        places = _places(ranks)
        node_names = {fact.node_rank: node for fact, (node, _) in zip(ranks, places, strict=True)}
        measured = {
            **_circumstances(step),
            "gradient_bytes": size,
            "hidden": None if hidden is None else round(hidden, 3),
            "links": [
                {
                    "nodes": [node_names[node] for node in ring.nodes],
                    "bandwidth": round(link.bandwidth),
                    "latency": float(f"{link.latency:.3g}"),
                }
                for ring, link in zip(rings, links, strict=True)
            ],
        }
        of_ranks = [
            RankSpeed(node, gpu_type or None, card, speed)
            for (node, gpu_type), card, speed in zip(places, cards, speeds, strict=True)
        ]
        _write(speeds_text(of_ranks, measured), len(ranks))
    dist.barrier(group=control)
    raise SystemExit(0)


def _measured_card(step: TrainingStep, control: dist.ProcessGroup, most: int | None) -> CardSpeed:
    """Of this rank, with the micro-batch that its memory holds."""
    asked = SIZES[-1] if most is None else most
    limit = find_micro_batch(step, asked, control)
    speed = measure_card(step, control, limit)
    return replace(speed, max_batch=limit) if limit < asked else speed


def gradient_bytes(model: nn.Module) -> int:
    """Bytes that the ranks exchange in each step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _places(ranks: Sequence[RankFacts]) -> list[tuple[str, str]]:
    """The name of each rank's node and its GPU type, "" without one, as the cluster's file has
    them."""
    places = JobEnv.from_environ().measured_ranks
    if places is None:
        return [(fact.node_name, "") for fact in ranks]
    if len(places) != len(ranks):
        raise JobEnvError(f"expected {len(places)} ranks ({MEASURED_RANKS}), got {len(ranks)}")
    return list(places)


def _circumstances(step: TrainingStep) -> dict[str, Any]:
    versions = {
        "ddp_slurm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": type(step.model).__name__,
        "precision": step.precision_name,
        "backend": dist.get_backend(),
        "versions": versions,
    }


def _write(text: str, ranks: int) -> None:
    path = JobEnv.from_environ().measure_file
    assert path is not None
    write_whole(Path(path), text)
    print(f"measured {counted(ranks, 'rank')}; wrote {path}", flush=True)
