"""--uneven and verify on real cards over NCCL: scripts under torchrun beside one process.

Exits non-zero if a check fails. On a machine without GPUs the same runs are on the CPU (gloo).

    python benchmarks/uneven_gpu_checks.py          # two ranks, shares 1 : 3
    python benchmarks/uneven_gpu_checks.py 1,2,4    # as many ranks as shares
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ddp_slurm.training import verify

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts" / "uneven"
SAMPLES = 93
"""Three whole global batches of 28, and one of 9: without --uneven a copy fills it up."""
GLOBAL_BATCH = 28


def parameters(words: list[str], ranks: int, **variables: str) -> list[float]:
    """Those of rank 0 after 20 steps under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if not torch.cuda.is_available():
        environ["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(
        [*command, "-m", "ddp_slurm.run", *words], env=environ, stdout=subprocess.PIPE, text=True
    )
    results = [json.loads(text) for text in re.findall(r'{"rank": .*?}', done.stdout)]
    if done.returncode or len(results) != ranks:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}")
    by_rank = {result["rank"]: result for result in results}
    model: list[float] = by_rank[0]["model"]
    return model


def difference(script: list[str], shares: str, *, uneven: bool) -> float:
    """The largest of the parameters, between ranks and one process with the whole batch."""
    file, *arguments = script
    ranks = len(shares.split(","))
    words = [str(SCRIPTS / file), str(GLOBAL_BATCH), str(SAMPLES), "2", *arguments]
    alone = parameters(words, 1)
    words[1] = str(GLOBAL_BATCH // ranks)
    option = ["--uneven"] if uneven else []
    found = parameters([*option, *words], ranks, DDP_SLURM_SHARES=shares)
    return max(abs(one - other) for one, other in zip(found, alone, strict=True))


def verified(loss: nn.Module) -> float:
    """The largest relative difference that ``verify`` finds in Python."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)]
    batches = [(torch.randn(28, 3, 8, 8), torch.randint(0, 4, (28,))) for _ in range(2)]
    check = verify(nn.Sequential(*layers).to(device), loss.to(device), batches)
    return max(check.differences.values())


def main(shares: str) -> int:
    ranks, gpus = len(shares.split(",")), torch.cuda.device_count()
    if 0 < gpus < ranks:
        print(f"{ranks} ranks need as many GPUs, found {gpus}; CUDA_VISIBLE_DEVICES= takes the CPU")
        return 2
    print(f"shares {shares} on {'GPUs' if gpus else 'CPU'}")
    checks = [
        ("plain DDP, --uneven", difference(["plain.py"], shares, uneven=True), 1e-6),
        (
            "plain DDP without it (must differ)",
            difference(["plain.py"], shares, uneven=False),
            -1e-3,
        ),
        ("verify(), mean loss", verified(nn.CrossEntropyLoss()), 1e-3),
        (
            "verify(), class weights (must differ)",
            verified(nn.CrossEntropyLoss(torch.tensor([1.0, 2, 4, 8]))),
            -1e-2,
        ),
    ]
    if importlib.util.find_spec("transformers"):
        for task in ("samples", "tokens"):
            script = ["hugging_face.py", task]
            checks.append((f"HF Trainer, {task}", difference(script, shares, uneven=True), 1e-6))
    failed = 0
    for name, found, limit in checks:
        is_right = found <= limit if limit > 0 else found >= -limit
        failed += not is_right
        print(f"{'ok  ' if is_right else 'FAIL'} {name}: {found:.1e}")
    words = ["python", str(SCRIPTS / "plain.py"), str(GLOBAL_BATCH // 2), str(SAMPLES), "2"]
    command = [sys.executable, "-m", "ddp_slurm.cli", "verify", f"--shares={shares}", "--", *words]
    status = subprocess.run(command).returncode
    print(f"{'FAIL' if status else 'ok  '} ddp-slurm verify: exit status {status}")
    return failed + (status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if sys.argv[1:] else "1,3"))
