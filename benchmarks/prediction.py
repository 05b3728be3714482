"""How good predicted steps are, and what ``--nodes auto --comm auto:bf16`` chooses by them.

    python -m benchmarks.prediction --live 8 --modelled 12      # the first need root

Random labs: 1 to 5 machines of 1 to 4 ranks, up to 5 times as fast as each other, links of 50
Mbit/s to 10 Gbit/s. The small ones are run: a network namespace for each machine, links limited
with tc tbf, measured as ``ddp-slurm measure`` does it; then every choice of machines trains in
every way through ``world.wrap``. The large ones are played by a model that is finer than the
prediction's. The table compares the choice with the best of all, and with the best machine alone.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.prediction_labs import Lab, Ways, measured, random_lab, step_seconds
from benchmarks.prediction_ranks import LiveLab, train
from ddp_slurm.balance import split_batch
from ddp_slurm.comm import Comm
from ddp_slurm.console import table
from ddp_slurm.curve import Curve
from ddp_slurm.exchange import BF16, SMALLER_BUCKETS, Box, Network, Way, exchange_seconds, ways_of
from ddp_slurm.predict import Prediction, fastest, predict
from ddp_slurm.training.links.choice import choose

AUTO = "auto:bf16"
EXACT = (Way(),)

Run = Callable[[Sequence[int], Sequence[int], Ways], list[float]]
"""Seconds of a step on some machines, with shares, in several ways."""


class Outcome(NamedTuple):
    """Of one lab."""

    best: float
    """Seconds of a step, of all choices and ways."""
    single: float
    """Of the best machine alone."""
    chosen: float
    choice: str
    errors: list[float]
    """Of each prediction, as a part of what was seen."""


def outcome_of(lab: Lab, network: Network, curves: Sequence[Sequence[Curve]], run: Run) -> Outcome:
    tuned = network._replace(bucket_choices=(None, *SMALLER_BUCKETS))
    boxes = [
        Box((str(machine),), tuple((curve, lab.batch) for curve in own))
        for machine, own in enumerate(curves)
    ]
    auto = tuned._replace(ways=ways_of(Comm.read(AUTO)))
    best = fastest(lab.batch, boxes, auto)
    assert best is not None
    seen, errors = [], []
    for choice in _choices(len(boxes)):
        own_boxes = [boxes[machine] for machine in choice]
        own_curves = [curve for machine in choice for curve in curves[machine]]
        shares = split_batch(lab.batch, own_curves)
        steps = [predict(lab.batch, own_boxes, tuned._replace(ways=EXACT))]
        if len(choice) > 1:
            steps.append(predict(lab.batch, own_boxes, tuned._replace(ways=(BF16,))))
        ways = [_way(step, comm) for step, comm in zip(steps, ("exact", "bf16"), strict=False)]
        is_chosen = tuple(map(str, choice)) == best.names
        found = run(choice, shares, [*ways, _way(best, AUTO)] if is_chosen else ways)
        if is_chosen:
            chosen = found.pop()
        for step, seconds in zip(steps, found, strict=True):
            assert step is not None
            errors.append(step.seconds / seconds - 1)
            seen.append((seconds, len(choice)))
    return Outcome(
        best=min(seconds for seconds, _ in seen),
        single=min(seconds for seconds, count in seen if count == 1),
        chosen=chosen,
        choice=",".join(best.names),
        errors=errors,
    )


def _choices(machines: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, machines + 1):
        yield from combinations(range(machines), count)


def _way(step: Prediction | None, comm: str) -> tuple[str, int | None, float]:
    assert step is not None
    return comm, step.bucket_bytes, step.compute


def live(lab: Lab, source: random.Random) -> Outcome:
    with LiveLab(lab) as machines:
        network, curves = machines.network()

        def run(choice: Sequence[int], shares: Sequence[int], ways: Ways) -> list[float]:
            found: list[float] = machines.run(choice, train, shares, ways)
            return found

        return outcome_of(lab, network, curves, run)


def modelled(lab: Lab, source: random.Random) -> Outcome:
    network, curves = measured(lab, source)

    def run(choice: Sequence[int], shares: Sequence[int], ways: Ways) -> list[float]:
        return [_modelled_step(lab, choice, shares, *way) for way in ways]

    return outcome_of(lab, network, curves, run)


def _modelled_step(
    lab: Lab,
    choice: Sequence[int],
    shares: Sequence[int],
    comm: str,
    bucket: int | None,
    compute: float,
) -> float:
    """With the way that ``world.wrap`` would find the fastest when the job starts."""
    exact = {way: step_seconds(lab, choice, shares, way, bucket) for way in ("flat", "two levels")}
    if comm == AUTO:
        network, curves = measured(lab, random.Random(0))
        boxes = [Box((str(m),), tuple((curve, lab.batch) for curve in curves[m])) for m in choice]
        seconds = exchange_seconds(boxes, network, Way()) if len(choice) > 1 else None
        comm = choose(Comm.read(AUTO), seconds, compute).kind
    if comm == "bf16":
        return step_seconds(lab, choice, shares, "bf16", bucket)
    return min(exact.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--live", type=int, default=8, help="small labs, which are run")
    parser.add_argument("--modelled", type=int, default=12, help="labs of any size, by the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    heads = ("LAB", "MBIT/S", "BEST MS", "CHOICE", "CHOSEN/BEST", "ALONE/CHOSEN", "OFF %", "MOST %")
    lines: list[Sequence[str]] = [("", *heads)]
    outcomes: list[dict[str, Any]] = []
    for number in range(options.live + options.modelled):
        source = random.Random(1000 * options.seed + number)
        is_live = number < options.live
        lab = random_lab(source, small=is_live)
        found = live(lab, source) if is_live else modelled(lab, source)
        outcomes.append({"live": is_live, **lab._asdict(), **found._asdict()})
        lines.append(("live" if is_live else "model", *_row(lab, found)))
        print("  ".join(lines[-1]), flush=True)
    print(table(lines))
    for is_live in (True, False):
        _summarize(is_live, [one for one in outcomes if one["live"] == is_live])
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes) + "\n")


def _row(lab: Lab, found: Outcome) -> tuple[str, ...]:
    errors = [abs(error) for error in found.errors]
    return (
        lab.name,
        str(lab.megabits),
        f"{1000 * found.best:.0f}",
        found.choice,
        f"{found.chosen / found.best:.3f}",
        f"{found.single / found.chosen:.2f}",
        f"{100 * statistics.median(errors):.1f}",
        f"{100 * max(errors):.1f}",
    )


def _summarize(is_live: bool, outcomes: Sequence[dict[str, Any]]) -> None:
    if not outcomes:
        return
    errors = sorted(abs(error) for one in outcomes for error in one["errors"])
    losses = [one["chosen"] / one["best"] - 1 for one in outcomes]
    slower = sum(one["chosen"] > 1.02 * one["single"] for one in outcomes)
    within = sum(error <= 0.1 for error in errors)
    print(
        f"{'run' if is_live else 'modelled'}: the choice is {100 * max(losses):.1f} % slower than "
        f"the best at most; slower than the best machine alone in {slower} of {len(outcomes)}; "
        f"{within} of {len(errors)} predictions within 10 %, {100 * max(errors):.1f} % at most"
    )


if __name__ == "__main__":
    main()
