"""What planning a large job costs: ``submit --dry-run`` for 10,000 nodes in six shapes.

    python benchmarks/submit_dry_run.py [RUNS]

It and the bare interpreter run in turn, as whole processes; each line is a ratio or a median of
RUNS (default 7) runs.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = [
    ("a100", 8, 4000),
    ("v100", 4, 2500),
    ("titan", 2, 1500),
    ("rtx_3090", 2, 1000),
    ("t4", 1, 600),
    ("h100", 8, 400),
]

SUBMIT = ("ddp_slurm.submit", "--backend", "sbatch", "--dry-run", "--", "train.py")


def cluster_yaml() -> str:
    lines = ["name: large", "nodes:"]
    for gpu, count, nodes in SHAPES:
        lines.append(f"  - name: {gpu.replace('_', '')}n[0001-{nodes:04}]")
        lines.append(f"    gpus: {{type: {gpu}, count: {count}}}")
        lines.append(f"    cpus: {count * 8}\n    memory: {count * 60}G")
    return "\n".join(lines) + "\n"


def seconds(command: list[str], folder: Path) -> tuple[float, bytes]:
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - started, done.stdout


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(cluster_yaml())
        submit = [sys.executable, "-m", *SUBMIT]
        pairs = []
        script = b""
        for _ in range(runs + 1):
            bare, _ = seconds([sys.executable, "-c", "pass"], folder)
            planned, script = seconds(submit, folder)
            pairs.append((bare, planned))
        pairs = pairs[1:]  # the first run reads the files from the disk
    nodes = sum(count for _, _, count in SHAPES)
    ranks = sum(gpus * count for _, gpus, count in SHAPES)
    start = statistics.median(bare for bare, _ in pairs)
    above = statistics.median(planned - bare for bare, planned in pairs)
    ratio = statistics.median(planned / bare for bare, planned in pairs)
    print(f"nodes {nodes}, components {len(SHAPES)}, ranks {ranks}")
    print(f"interpreter start {start:.3f} s (median of {runs})")
    print(f"submit --dry-run above it {above:.3f} s (at most 0.5)")
    print(f"submit --dry-run / interpreter start {ratio:.1f}")
    print(f"script {len(script)} bytes / 16384 = {len(script) / 16384:.2f} (at most 1)")


if __name__ == "__main__":
    main()
