"""``python -m ddp_slurm.training.scripts.compare WHOLE RANKS``: two recordings side by side."""

import sys

import torch

from ddp_slurm.training.uneven.verify import GradientCheck, Recording, compare


def compare_files(whole: str, ranks: str) -> GradientCheck:
    """Two files of ``recording.record``."""
    recordings = [Recording(**torch.load(file, weights_only=True)) for file in (whole, ranks)]
    return compare(*recordings)


def main(argv: list[str]) -> int:
    """Print the table. Returns 0 for the same gradients, 1 for others."""
    check = compare_files(*argv)
    print(check)
    return 0 if check.is_exact else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
