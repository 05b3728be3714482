"""What slow links cost, and what each way of exchanging gradients makes of it. Needs root.

    # uneven machines, gloo: one all-reduce in one level, in two, and in two with bf16 between them
    python -m benchmarks.links --json sums.json
    # two cards of this host, a link between them: images/s as part of the sum of the cards alone
    python -m benchmarks.links --gpus --json gpus.json
    # the same with exact gradients in buckets of 1, 5 and 25 MiB, behind more computing
    python -m benchmarks.links --gpus --rates 10gbit --buckets 1,5,25 --batch-size 4096
    # the same on CPUs, with a small network and few steps
    python -m benchmarks.links --gpus --rehearse

Machines are network namespaces, links are limited with tc tbf. ``--tools FOLDER`` names a folder
in which iproute2 is unpacked, where the system has none. Each figure has a time limit, and all
together have one (``--limit``): what was not reached is left out.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.links_network import Machines
from benchmarks.links_ranks import Ranks
from ddp_slurm.console import table
from ddp_slurm.training.links.layout import Layout

WAYS = ("local:32", "bf16", "powersgd", "exact", "local:8")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--gpus", action="store_true", help="two cards of this host, ResNet-18")
parser.add_argument("--rehearse", action="store_true", help="with --gpus: on CPUs, small and short")
parser.add_argument("--rates", help="links, as 1gbit,10gbit,unlimited")
parser.add_argument("--buckets", help="with --gpus: exact, in buckets of so many MiB, as 1,5,25")
parser.add_argument("--megabytes", type=float, default=6.0, help="of an all-reduce; default 6")
parser.add_argument("--batch-size", type=int, help="per card; default 1024")
parser.add_argument("--seconds", type=float, help="of each figure; default 4")
parser.add_argument("--cell-limit", type=float, default=40.0, help="seconds for one figure")
parser.add_argument("--limit", type=float, default=225.0, help="seconds for all")
parser.add_argument("--json", type=Path, help="write all figures to this file")
parser.add_argument("--tools", type=Path, help="a folder with iproute2 unpacked in it")


def bits_per_second(rate: str) -> float:
    if rate == "unlimited":
        return float("inf")
    return float(rate[:-4]) * BITS[rate[-4:]]


def sums(arguments: argparse.Namespace, layouts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """One all-reduce over uneven machines in three ways."""
    size = int(arguments.megabytes * 1e6)
    ways = {"one level": (False, False), "two levels": (True, False), "two, bf16": (True, True)}
    cells = []
    for tasks in layouts:
        with Machines(len(tasks), arguments.tools) as machines:
            ranks = Ranks(machines, tasks, gpus=False)
            for rate in (arguments.rates or "100mbit").split(","):
                for way, (two_levels, bf16) in ways.items():
                    machines.limit(rate)
                    cell = {"kind": "sum", "bytes": size, "repeats": 3}
                    cell |= {"two_levels": two_levels, "bf16": bf16}
                    found = ranks.run(cell, arguments.cell_limit)
                    layout = Layout.of([node for node, n in enumerate(tasks) for _ in range(n)])
                    traffic = layout.traffic(two_levels=two_levels) / (2 if bf16 else 1)
                    bound = 8 * size * traffic / bits_per_second(rate)
                    seconds = max(found) if found else None
                    cells.append(
                        {"tasks": list(tasks), "rate": rate, "way": way, "seconds": seconds}
                        | {"bound_seconds": bound}
                    )
            ranks.end()
    return cells


def print_sums(cells: Sequence[dict[str, Any]]) -> None:
    rows: list[tuple[str, ...]] = [("ranks", "link", "way", "seconds", "of the link", "faster")]
    flat = 0.0
    for cell in cells:
        seconds = cell["seconds"]
        if cell["way"] == "one level":
            flat = seconds or 0.0
        figures = ("-", "-", "-")
        if seconds:
            part = cell["bound_seconds"] / seconds
            figures = (f"{seconds:.3f}", f"{part:.2f}", f"{flat / seconds:.2f}x")
        name = "+".join(map(str, cell["tasks"]))
        rows.append((name, cell["rate"], cell["way"], *figures))
    print(table(rows))


def trainings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A training on two cards with a link between them."""
    small = arguments.rehearse
    common = {
        "kind": "train",
        "small": small,
        "batch": arguments.batch_size or (8 if small else 1024),
        "seconds": arguments.seconds or (0.3 if small else 4.0),
    }
    rates = (arguments.rates or ("10mbit,unlimited" if small else "1gbit,10gbit,unlimited")).split(
        ","
    )
    ways = WAYS
    if arguments.buckets:
        ways = tuple(f"exact@{size}" for size in arguments.buckets.split(","))
    order = [("unlimited", "alone"), *((rate, way) for rate in rates for way in ways)]
    started = time.monotonic()
    cells = []
    with Machines(2, arguments.tools) as machines:
        ranks = Ranks(machines, (1, 1), gpus=not small)
        for rate, way in order:
            left = arguments.limit - (time.monotonic() - started)
            if left < 5:
                print(f"--limit: {rate} {way} is left out", flush=True)
                continue
            machines.limit(rate)
            found = ranks.run({**common, "way": way}, min(arguments.cell_limit, left))
            images = sum(result["images"] for result in found) if found else None
            size = found[0]["bytes"] if found else None
            cells.append({"rate": rate, "way": way, "images_per_second": images, "bytes": size})
            shown = "failed" if images is None else f"{images:,.0f} images/s"
            at = time.monotonic() - started
            print(f"{at:5.0f} s  {rate} {way}: {shown}", flush=True)
        ranks.end()
    _add_parts(cells, 2 * common["batch"])
    return cells


def _add_parts(cells: list[dict[str, Any]], global_batch: int) -> None:
    """Each cell's part of the cards alone, and of the most that its link allows exact gradients."""
    alone = cells[0]["images_per_second"]
    for cell in cells:
        if not alone or not cell["images_per_second"]:
            continue
        cell["part"] = cell["images_per_second"] / alone
        # of two ranks: 2 (R-1)/R = 1 times the gradients
        on_link = 8 * cell["bytes"] / bits_per_second(cell["rate"])
        bound = global_batch / max(on_link, global_batch / alone)
        cell["part_of_exact_bound"] = cell["images_per_second"] / bound


def print_trainings(cells: Sequence[dict[str, Any]]) -> None:
    rates = list(dict.fromkeys(cell["rate"] for cell in cells[1:]))
    found = {(cell["rate"], cell["way"]): cell for cell in cells}
    print(f"the cards alone: {cells[0]['images_per_second'] or 0:,.0f} images/s in all")
    rows: list[tuple[str, ...]] = [("part of the sum alone", *rates)]
    ways = dict.fromkeys(cell["way"] for cell in cells[1:])
    for way in sorted(ways):
        parts = [found.get((rate, way), {}).get("part") for rate in rates]
        rows.append((way, *("-" if part is None else f"{part:.3f}" for part in parts)))
    for way in (way for way in sorted(ways) if way.startswith("exact")):
        bounds = [found.get((rate, way), {}).get("part_of_exact_bound") for rate in rates]
        name = f"{way}, part of the link's bound"
        rows.append((name, *("-" if part is None else f"{part:.3f}" for part in bounds)))
    print(table(rows))


def main() -> None:
    arguments = parser.parse_args()
    if arguments.gpus:
        cells = trainings(arguments)
        print_trainings(cells)
    else:
        cells = sums(arguments, [(4, 2), (4, 2, 1)])
        print_sums(cells)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
