"""The file of speeds: how long a step takes on each GPU type, and what joins the nodes.

``ddp-slurm measure`` writes it, and a person may. A file without the key ``measured``, whose
entries have alpha and beta only, is as valid as one with everything.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ddp_slurm.curve import Curve
from ddp_slurm.errors import DdpSlurmError, quoted
from ddp_slurm.exchange import HIDDEN, Link, Network
from ddp_slurm.job_env import KnownLimits
from ddp_slurm.schema.fields import host_name, one_line, positive_number, seconds, word
from ddp_slurm.schema.schema import Error, Invalid, Schema, check, key, mapping_of, short, tuple_of
from ddp_slurm.schema.yaml_file import load_yaml, validate

MEASURED = "measured"
"""The key that is neither a node nor a GPU type."""

Point = tuple[int, float]
"""Samples, and the seconds of their step."""


class SpeedsError(DdpSlurmError):
    """A file of speeds cannot be used."""


def _above_zero(value: Any) -> float:
    number = seconds(value)
    if number == 0:
        raise ValueError("0 is too little; it must be more than 0")
    return number


def _bytes(value: Any) -> float:
    number = r"[0-9]*\.?[0-9]+([eE]\+?[0-9]{1,2})?"
    if isinstance(value, str) and re.fullmatch(number, value) and float(value) > 0:
        return float(value)
    raise ValueError(f"{short(value)} is not a number of bytes > 0, such as 117000000 or 1.17e8")


def _part(value: Any) -> float:
    number = seconds(value)
    if number > 1:
        raise ValueError(f"{quoted(value)} is not a part; expected a number from 0 to 1")
    return number


def _point(value: Any) -> Point:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"expected [samples, seconds], such as [64, 0.021], got {short(value)}")
    return positive_number(value[0]), _above_zero(value[1])


def _points(value: Any) -> tuple[Point, ...]:
    points = tuple_of(_point)(value)
    if not points:
        raise ValueError("an empty list; expected [[samples, seconds], ...]")
    samples = [point[0] for point in points]
    if samples != sorted(set(samples)):
        raise ValueError(f"the samples {samples} must ascend")
    return points


def _pair(value: Any) -> tuple[str, str]:
    names = tuple_of(host_name)(value)
    if len(names) != 2:
        raise ValueError(
            "expected two nodes, such as [alpha, beta], or [alpha, alpha] for the ranks inside a "
            f"node, got {len(names)}"
        )
    return names[0], names[1]


@dataclass(frozen=True, init=False)
class Speed(Schema):
    """Seconds of one optimizer step on one GPU: through measured points, or ``alpha + beta * n``.

    A rank that drives all GPUs of its node shares its samples out to them, whether its speed was
    found under the node's name or the GPU type's.
    """

    beta: float | None = key(seconds, None, "SECONDS", "seconds a sample; or give points")
    alpha: float = key(seconds, 0.0, "SECONDS", "fixed cost of a step, in seconds")
    points: tuple[Point, ...] | None = key(
        _points, None, "[[N, SECONDS], ...]", "measured: a step of N samples takes SECONDS"
    )
    max_batch: int | None = key(
        positive_number, None, "N", "the most samples that the GPU's memory holds at once"
    )
    card: str | None = key(one_line, None, "NAME", "the GPU's model, for a person")

    def misfits(self) -> list[Error]:
        if self.beta is None and self.points is None:
            return [(("beta",), "missing; give beta, in seconds a sample, or points")]
        if self.beta is not None and self.points is not None:
            return [(("points",), "cannot be combined with beta: both give the seconds of a step")]
        return []

    @cached_property
    def curve(self) -> Curve:
        """Of one GPU."""
        if self.points is not None:
            return Curve.through(self.points)
        assert self.beta is not None
        return Curve.line(self.alpha, self.beta)


@dataclass(frozen=True, init=False)
class LinkEntry(Schema):
    """What an all-reduce reaches between two nodes, or between the ranks of one."""

    nodes: tuple[str, str] = key(_pair)
    bandwidth: float = key(_bytes)
    latency: float = key(seconds, 0.0, "SECONDS", "of an empty message, one way")


@dataclass(frozen=True, init=False)
class Measured(Schema):
    """What ``ddp-slurm measure`` found besides the cards' speeds, and with what."""

    date: str | None = key(one_line, None, "TIME", "UTC, ISO 8601")
    model: str | None = key(one_line, None, "NAME", "the class of the model")
    precision: str | None = key(one_line, None, "NAME", "fp32, bf16 or fp16")
    backend: str | None = key(one_line, None, "NAME", "nccl or gloo")
    versions: dict[str, str] = key(mapping_of(word, one_line), {}, "{NAME: VERSION}", "of rank 0")
    gradient_bytes: float | None = key(
        _bytes, None, "BYTES", "gradients that a step exchanges: 4 for each parameter in fp32"
    )
    hidden: float = key(
        _part, HIDDEN, "PART", "of a step's compute, 0 to 1, during which gradients are exchanged"
    )
    links: tuple[LinkEntry, ...] = key(
        tuple_of(LinkEntry.read), (), "[{...}, ...]", "between pairs of nodes"
    )

    def network(self) -> Network | None:
        """None where gradients or links were not measured."""
        if self.gradient_bytes is None or not self.links:
            return None
        links = {frozenset(link.nodes): Link(link.bandwidth, link.latency) for link in self.links}
        return Network(self.gradient_bytes, links, self.hidden)


class Speeds(NamedTuple):
    """The content of a file of speeds."""

    entries: dict[str, Speed]
    """By node name or GPU type; a node's own entry comes before its type's."""
    measured: Measured | None = None
    """None in a file without that key."""

    def known_limits(self) -> KnownLimits | None:
        """The most samples that each card runs at once; None where nothing was measured.

        A card that took the largest measured batch is known to take that one. Of several entries
        with one card the smallest counts.
        """
        measured = self.measured
        if measured is None or measured.model is None or measured.precision is None:
            return None
        of_card: dict[str, int] = {}
        for speed in self.entries.values():
            largest = speed.max_batch or (speed.points[-1][0] if speed.points else None)
            if speed.card is not None and largest is not None:
                of_card[speed.card] = min(largest, of_card.get(speed.card, largest))
        return KnownLimits(measured.model, measured.precision, of_card) if of_card else None


def read_speeds(path: Path) -> Speeds:
    """Raises SpeedsError with all errors of the file."""
    return validate(_read, load_yaml(path, SpeedsError), SpeedsError)


def _read(value: Any) -> Speeds:
    measured = None
    errors: list[Error] = []
    if isinstance(value, dict) and MEASURED in value:
        value = dict(value)
        measured = check(Measured.read, value.pop(MEASURED), MEASURED, errors)
    try:
        entries = mapping_of(word, Speed.read)(value)
    except Invalid as invalid:
        errors += invalid.errors
    if errors:
        raise Invalid(errors)
    if not entries:
        raise ValueError("no node and no GPU type; give one, such as 'a100: {beta: 0.001}'")
    return Speeds(entries, measured)
