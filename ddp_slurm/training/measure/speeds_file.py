"""What all ranks have measured, as the text of a file of speeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_slurm.curve import Curve
from ddp_slurm.training.measure.cards import CardSpeed

FIRST_LINE = "# Made by ddp-slurm measure: seconds, samples, bytes and bytes a second."
UNLIKE = 0.1
"""A node whose cards differ from the others of their type by more than this part gets an entry of
its own."""


@dataclass(frozen=True)
class RankSpeed:
    """One rank's card."""

    node: str
    gpu_type: str | None
    """As the cluster's file has it; None where it names no type."""
    card: str
    speed: CardSpeed


def speeds_text(ranks: Sequence[RankSpeed], measured: Mapping[str, Any]) -> str:
    """YAML, which ``ddp_slurm.job.speeds`` reads: every value is written as JSON is."""
    lines = [FIRST_LINE]
    for name, entry in entries_of(ranks).items():
        lines += _mapping(name, entry)
    lines += _mapping("measured", {k: v for k, v in measured.items() if k != "links"})
    links = measured.get("links", [])
    if links:
        lines += ["  links:", *(f"  - {json.dumps(link)}" for link in links)]
    return "\n".join(lines) + "\n"


def _mapping(name: str, values: Mapping[str, Any]) -> list[str]:
    items = [f"  {key}: {json.dumps(value)}" for key, value in values.items() if value is not None]
    return [f"{name}:", *items]


def entries_of(ranks: Sequence[RankSpeed]) -> dict[str, dict[str, Any]]:
    """The cards' entries: by GPU type, and by node for those without a type and those unlike."""
    by_type: dict[str | None, list[RankSpeed]] = {}
    for rank in ranks:
        by_type.setdefault(rank.gpu_type, []).append(rank)
    entries = {
        gpu_type: _entry(alike) for gpu_type, alike in by_type.items() if gpu_type is not None
    }
    nodes: dict[str, list[RankSpeed]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank)
    for node, own in nodes.items():
        types = {rank.gpu_type for rank in own}
        gpu_type = own[0].gpu_type
        if gpu_type is None or (len(types) == 1 and _is_unlike(_entry(own), entries[gpu_type])):
            entries[node] = _entry(own)
    return entries


def _entry(alike: Sequence[RankSpeed]) -> dict[str, Any]:
    """Of several cards of one type: at each size the median of those that ran it."""
    times: dict[int, list[float]] = {}
    for rank in alike:
        for size, seconds in rank.speed.points:
            times.setdefault(size, []).append(seconds)
    points = [[size, _short(statistics.median(times[size]))] for size in sorted(times)]
    limits = [rank.speed.max_batch for rank in alike if rank.speed.max_batch is not None]
    return {
        "card": alike[0].card,
        "points": points,
        "max_batch": min(limits, default=None),
    }


def _short(number: float) -> float:
    """Four digits: more are noise."""
    return float(f"{number:.4g}")


def _is_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """At the largest size that both have."""
    size = max({point[0] for point in one["points"]} & {point[0] for point in other["points"]})
    own, usual = (Curve.through(entry["points"]).seconds(size) for entry in (one, other))
    return abs(own - usual) > UNLIKE * usual
