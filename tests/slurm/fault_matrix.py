"""The fault matrix: what a training job on live Slurm does when something breaks.

    python -m tests.slurm.fault_matrix [--release 24.11] [--times 5] [ROW ...]

as root; without ROW all of them. Adds the outcomes to fault_outcomes.jsonl beside this file, and
writes the table of all of them into docs/reliability.md. A row is one fault in a job of three ranks
on three nodes, each a component of its own, at a random moment.
"""

import argparse
import json
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.lab import Lab, config
from ddp_slurm.lab.layout import LabLayout
from ddp_slurm.lab.releases import slurm_root
from tests.slurm.conftest import load_cluster
from tests.slurm.fault_runs import (
    CLUSTER,
    NODES,
    STEPS_AN_EPOCH,
    FaultRun,
    files_left_over,
    final_losses,
)
from tests.slurm.faults import ROWS, Row, fill_disk

SYSTEM_PATH = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
OUTCOMES = Path(__file__).with_name("fault_outcomes.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
LINE_CHARACTERS = 110
PATIENCE_SECONDS = 900.0
"""For the end of the ranks and of the job after the fault; with restarts on a busy machine."""


@dataclass(frozen=True)
class Outcome:
    """What was seen of one run."""

    row: str
    release: str
    seen_after_seconds: float
    """From the fault to the end of the last rank that was running then."""
    end: str
    restarts: int
    log_line: str
    """The line that names the cause; empty where none matches."""
    steps_lost: int
    resume_equal: bool
    """Whether the losses of all epochs are those of an undisturbed run, bit for bit."""
    left_over: tuple[str, ...]
    """Ranks after the end; files after the training that follows a bad end."""
    as_expected: bool


class Bench:
    """Runs rows, each in a new lab of one Slurm release; keeps the losses of undisturbed runs."""

    def __init__(self, release: str, work: Path, logs: Path | None = None) -> None:
        self.release = release
        self.root = slurm_root(release)
        self.work = work
        self.logs = logs
        self.references: dict[int, list[float]] = {}
        self.runs = 0

    def run(self, name: str) -> Outcome:
        """One run of a row; a job that did not end well is submitted again in a healthy lab."""
        row = ROWS[name]
        with self.new_folder(row) as folder:
            with self.new_lab(row.slurm_conf) as lab:
                run = self.new_run(lab, folder)
                ended_after, end = disturb(run, row)
                log, restarts, ranks = run.log(), run.restarts(), run.ranks_left_over()
            lost = steps_lost(log)
            if end != "COMPLETED":
                (folder / "filler").unlink(missing_ok=True)
                with self.new_lab() as lab:
                    self.train(self.new_run(lab, folder), row.epochs)
            equal = final_losses(folder) == self.reference(row.epochs)
            left_over = (*ranks, *files_left_over(folder))
        line = first_match(row.named, log)
        good = bool(re.fullmatch(row.end, end) and (line or not row.named) and equal)
        if self.logs and not (good and not left_over):
            (self.logs / f"{name}-{self.release}-{os.getpid()}-{self.runs}.log").write_text(log)
        return Outcome(
            row=name,
            release=self.release,
            seen_after_seconds=round(ended_after, 1),
            end=end,
            restarts=restarts,
            log_line=line,
            steps_lost=lost,
            resume_equal=equal,
            left_over=left_over,
            as_expected=good and not left_over,
        )

    def reference(self, epochs: int) -> list[float]:
        """The losses of an undisturbed run."""
        if epochs not in self.references:
            with self.new_folder(None) as folder, self.new_lab() as lab:
                self.train(self.new_run(lab, folder), epochs)
                self.references[epochs] = final_losses(folder)
        return self.references[epochs]

    def train(self, run: FaultRun, epochs: int) -> None:
        """Train, or go on from the folder's snapshot, to the end."""
        submitted = run.submit(epochs=epochs)
        assert submitted.returncode == 0, submitted.stderr
        assert run.wait_for_end() == "COMPLETED", run.log()

    @contextmanager
    def new_folder(self, row: Row | None) -> Iterator[Path]:
        """A folder for one run; on a small disk of its own where the row fills it."""
        self.runs += 1
        folder = self.work / str(self.runs)
        folder.mkdir()
        small = row is not None and row.inject is fill_disk
        if small:
            mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
            subprocess.run(mount, check=True)
        try:
            yield folder
        finally:
            if small:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)

    def new_lab(self, slurm_conf: tuple[str, str] = ("", "")) -> Lab:
        """A lab; ``slurm_conf``: text in its slurm.conf, and what replaces it."""
        write_configuration = config.write_configuration

        def write(lab: LabLayout, cluster: Cluster, version: str) -> None:
            write_configuration(lab, cluster, version)
            text = lab.slurm_conf.read_text()
            lab.slurm_conf.write_text(text.replace(*slurm_conf) if slurm_conf[0] else text)

        name = f"test-{os.getpid()}-f{self.runs}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "write_configuration", write)
            return Lab.up(load_cluster(CLUSTER, self.work), name, self.root)

    def new_run(self, lab: Lab, folder: Path) -> FaultRun:
        if self.root is None:
            return FaultRun(lab, folder)
        tools = self.work / f"tools-{self.runs}"
        tools.mkdir(exist_ok=True)
        for program in ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo"):
            # The release's own program, not this one again.
            write_program(tools / program, lab.command(["env", SYSTEM_PATH, program]))
        path = f"{tools}:{os.environ['PATH']}"
        # Entering its own mount namespace brings a rank out of the root and to this Python; rank 0
        # asks Slurm, too.
        leave = ["nsenter", "--mount=/proc/self/ns/mnt", "--", "env", "-C", "$PWD", f"PATH={path}"]
        write_program(tools / "python", [*leave, sys.executable])
        return FaultRun(lab, folder, str(tools / "python"), path)


def write_program(path: Path, argv: list[str]) -> None:
    """A shell script that runs ``argv`` with its own arguments behind; $PWD is left as it is."""
    words = " ".join('"$PWD"' if word == "$PWD" else shlex.quote(word) for word in argv)
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)


def disturb(run: FaultRun, row: Row) -> tuple[float, str]:
    """Submit, break, wait: the seconds until the disturbed ranks had ended, and the final state."""
    submitted = run.submit(*row.options, fault=row.planted, epochs=row.epochs)
    assert submitted.returncode == 0, submitted.stderr
    pids: list[int] = []
    if row.trains:
        run.wait_for_training()
        pids = [pid for rank in range(len(NODES)) for pid in run.rank_pids(rank)]
    handles = [os.pidfd_open(pid) for pid in pids]
    began = time.monotonic()
    fault = threading.Thread(target=row.inject, args=(run,))
    fault.start()
    for handle in handles:
        select.select([handle], [], [], max(0.0, began + PATIENCE_SECONDS - time.monotonic()))
        os.close(handle)
    ended_after = time.monotonic() - began
    fault.join()
    return ended_after, run.wait_for_end(PATIENCE_SECONDS)


def first_match(pattern: str, log: str) -> str:
    lines = [line for line in log.splitlines() if pattern and re.search(pattern, line)]
    return lines[0].strip() if lines else ""


def steps_lost(log: str) -> int:
    """Steps of reported epochs that a restarted attempt repeated."""
    lost = 0
    done = 0
    for line in log.splitlines():
        epoch = re.search(r"epoch (\d+)/\d+ +evaluation", line)
        resumed = re.search(r"resumed from .* step (\d+)", line)
        if epoch:
            done = int(epoch[1]) * STEPS_AN_EPOCH
        if resumed:
            lost += max(0, done - int(resumed[1]))
    return lost


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as rows of Markdown, the runs of a row and a release together."""
    lines = [
        "| fault | Slurm | runs as they should be | seen after | end | the log names | steps lost |"
        " resume equal | left over |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.row, outcome.release), []).append(outcome)
    for (name, release), group in groups.items():
        seconds = [outcome.seen_after_seconds for outcome in group]
        cells = [
            ROWS[name].about,
            release,
            f"{sum(outcome.as_expected for outcome in group)} of {len(group)}",
            different(f"{value:g} s" for value in (min(seconds), max(seconds))),
            different(f"{outcome.end}, {outcome.restarts} restarts" for outcome in group),
            shortened(group[0].log_line),
            different(str(outcome.steps_lost) for outcome in group),
            different("yes" if outcome.resume_equal else "no" for outcome in group),
            different(" ".join(outcome.left_over) or "nothing" for outcome in group),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def shortened(line: str) -> str:
    """The beginning of a line of the log, without folders."""
    text = re.sub(r"/\S+/", "", line)
    if len(text) > LINE_CHARACTERS:
        text = text[:LINE_CHARACTERS].rstrip() + " …"
    return f"`{text}`" if text else "-"


def different(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def read_outcomes(file: Path) -> list[Outcome]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def write_table(outcomes: Sequence[Outcome], page: Path) -> None:
    """Replace the table of a page."""
    order = list(ROWS)
    rows = sorted(outcomes, key=lambda outcome: (order.index(outcome.row), outcome.release))
    text, count = re.subn(r"(?m)(^\|.*\n)+", lambda _: f"{table(rows)}\n", page.read_text())
    assert count == 1, f"{page} has {count} tables"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--release", default="22.05")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help="one a line, appended to")
    parser.add_argument("--logs", type=Path, help="folder for the logs of unexpected outcomes")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults") as work:
        bench = Bench(arguments.release, Path(work), arguments.logs)
        for _ in range(arguments.times):
            for name in arguments.rows or ROWS:
                outcome = bench.run(name)
                print(outcome, flush=True)
                with arguments.outcomes.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    write_table(read_outcomes(arguments.outcomes), PAGE)


if __name__ == "__main__":
    main()
