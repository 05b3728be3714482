"""The CIFAR-10 example with its best recipe: accuracy and seconds of several seeds.

    python benchmarks/cifar10_recipe.py cifar10.npz --gpus 1
    python benchmarks/cifar10_recipe.py cifar10.npz --gpus 2

The seconds are those from the end of the first optimizer step to the last line, with the last
evaluation and the snapshot. Further options of cifar10_example/train.py: ``--more "--lr 0.3"``.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "cifar10_example" / "train.py"
RECIPE = [
    "--model",
    "resnet9",
    "--global-batch-size",
    "500",
    "--lr",
    "0.4",
    "--label-smoothing",
    "0.2",
    "--mirror-test",
]

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("data", help="an .npz archive or torchvision's folder")
parser.add_argument("--gpus", type=int, default=1)
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=18)
parser.add_argument("--more", default="", help="options of the example")


def train(options: argparse.Namespace, seed: int, folder: Path) -> tuple[float, float]:
    """Percent of the test images, and seconds from the first step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    epochs = str(options.epochs)
    paths = ["--data", options.data, "--snapshot", str(folder / f"{seed}.pt")]
    words = [epochs, epochs, *paths, "--seed", str(seed), *RECIPE, *options.more.split()]
    first_step = end = 0.0
    last = ""
    with subprocess.Popen(
        [*torchrun, str(options.gpus), str(SCRIPT), *words],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first optimizer step"):
                first_step = time.monotonic()
            if line.startswith(("finished:", "graphs:")):
                last, end = line.strip(), time.monotonic()
                print(f"seed {seed}, {end - first_step:.1f} s: {last}", flush=True)
    if process.returncode != 0:
        sys.exit(f"the example ended with status {process.returncode}")
    return 100 * float(last.rpartition("accuracy ")[2]), end - first_step


def main() -> None:
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [train(options, seed, Path(folder)) for seed in range(options.seeds)]
    accuracies, seconds = zip(*found, strict=True)
    print(
        f"{options.gpus} GPU(s), {options.epochs} epochs: {statistics.fmean(accuracies):.2f} % "
        f"({min(accuracies):.2f} to {max(accuracies):.2f}) in {statistics.fmean(seconds):.1f} s "
        f"from the first step (at most {max(seconds):.1f})"
    )


if __name__ == "__main__":
    main()
