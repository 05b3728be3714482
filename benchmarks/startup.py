"""What a command costs before it does anything: its time above the interpreter's own start.

    python benchmarks/startup.py [RUNS [OTHER_PYTHON]]

All commands run in turn, as whole processes, RUNS (default 15) times; each line is a median of the
differences, of the clock and of the processor's time, which other load on the machine does not
change much. With OTHER_PYTHON, an interpreter with another version of ddp_slurm, both are measured
side by side in one run.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLUSTER = "nodes:\n  - {name: 'n[1-3]', gpus: 1}\n  - {name: big, gpus: 4}\n"
SUBMIT = ("submit", "--backend", "sbatch", "--dry-run", "--", "train.py")


class Installation:
    """One interpreter with its ddp_slurm, and a folder with a run that has ended."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        folder.mkdir()
        (folder / "cluster.yaml").write_text(CLUSTER)
        run = ("submit", "--backend", "local", "--nodes", "n1", "--", "true")
        subprocess.run(self.argv(*run), cwd=folder, capture_output=True, check=True)
        job_id = next((folder / "ddp_slurm_runs").iterdir()).name
        self.commands = {
            "--version": ("--version",),
            "status": ("status", job_id),
            "logs": ("logs", job_id),
            "plan": ("plan",),
            "submit --dry-run": SUBMIT,
        }
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in self.commands}

    def argv(self, *words: str) -> list[str]:
        return [self.python, "-m", "ddp_slurm.cli", *words]

    def measure(self) -> None:
        bare = elapsed([self.python, "-c", "pass"], self.folder)
        for name, words in self.commands.items():
            times = elapsed(self.argv(*words), self.folder)
            self.seconds[name].append((times[0] - bare[0], times[1] - bare[1]))

    def milliseconds(self, name: str) -> tuple[float, float]:
        clock, processor = zip(*self.seconds[name][1:], strict=True)  # the first reads from disk
        return 1000 * statistics.median(clock), 1000 * statistics.median(processor)


def elapsed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds by the clock, and of processor time."""
    started, used = time.perf_counter(), processor_seconds()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started, processor_seconds() - used


def processor_seconds() -> float:
    """Of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    pythons = [sys.executable, *sys.argv[2:3]]
    with tempfile.TemporaryDirectory() as name:
        installed = [Installation(p, Path(name) / str(i)) for i, p in enumerate(pythons)]
        for _ in range(runs + 1):
            for one in installed:
                one.measure()
    print(f"ms above the interpreter's start, clock and processor (median of {runs})")
    for command in installed[0].commands:
        line = f"{command:18}"
        for one in installed:
            clock, processor = one.milliseconds(command)
            line += f"  {clock:7.1f} {processor:7.1f}"
        print(line)


if __name__ == "__main__":
    main()
