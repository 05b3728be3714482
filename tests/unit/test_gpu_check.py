"""The health check of the GPUs, with stubs of sinfo, scontrol and nvidia-smi."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cluster_setup" / "gpu_check.sh"
WHOLE = "GPU 0: NVIDIA A100 (UUID: GPU-0)\nGPU 1: NVIDIA A100 (UUID: GPU-1)"
DIVIDED = f"{WHOLE}\n  MIG 1g.10gb Device 0: (UUID: MIG-0)\n  MIG 1g.10gb Device 1: (UUID: MIG-1)"
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:17:00.0"


def check(
    folder: Path, record: str, gpus: str = WHOLE, mig: str = "0, [N/A]\n1, [N/A]", status: int = 0
) -> str:
    """Run the check on node ``a``; returns its call of ``scontrol``, empty for none.

    ``record`` is GRES|STATE|REASON as sinfo prints it, ``gpus`` and ``mig`` the answers of
    nvidia-smi, ``status`` its exit status.
    """
    nvidia_smi = f"""case $1 in
    --list-gpus) echo {shlex.quote(gpus)} ;;
    *mig*) echo {shlex.quote(mig)} ;;
esac
exit {status}"""
    stubs = {
        "sinfo": f"echo {shlex.quote(record)}",
        "scontrol": f'echo "$*" >{folder}/calls',
        "nvidia-smi": nvidia_smi,
    }
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURMD_NODENAME": "a"}
    subprocess.run(["sh", SCRIPT], env=environ, check=True)
    calls = folder / "calls"
    return calls.read_text().strip() if calls.exists() else ""


def drain(found: int, expected: int) -> str:
    reason = f"gpu_check: {found} of {expected} GPUs respond"
    return f"update NodeName=a State=DRAIN Reason={reason}"


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:a100:2(S:0-1)", 2),
        ("gpu:a100:1(S:0,2),gpu:titan:2(S:1),nic:4", 3),
        ("gpu:4(S:0-1)", 4),
        ("gpu:a:b:2", 2),
        ("gpu", 1),
        ("gpu:a100", 1),
        ("gpu:no_consume:3", 3),
        ("nic:2,mps:400", 0),
        ("(null)", 0),
    ],
)
def test_gpu_check_reads_gres_like_the_client(tmp_path: Path, gres: str, expected: int) -> None:
    none = "No devices were found"
    call = check(tmp_path, f"{gres}|idle|none", gpus=none)
    assert call == (drain(0, expected) if expected else "")


@pytest.mark.parametrize(
    ("gpus", "mig", "found"),
    [
        (WHOLE, "0, [N/A]\n1, [N/A]", 2),
        (DIVIDED, "0, Disabled\n1, Enabled", 3),
        (WHOLE, "0, Disabled\n1, Enabled", 1),
        (f"{INFOROM}\n{WHOLE}", 'Field "mig.mode.current" is not a valid field to query.', 2),
        ("Unable to determine the device handle for GPU0: GPU is lost", "", 0),
    ],
    ids=["whole", "divided", "without instances", "old driver", "lost"],
)
def test_gpu_check_counts_cards_and_mig_instances(
    tmp_path: Path, gpus: str, mig: str, found: int
) -> None:
    assert check(tmp_path, "gpu:9|idle|none", gpus, mig) == drain(found, 9)
    (tmp_path / "calls").unlink()
    assert check(tmp_path, f"gpu:{found}|idle|none" if found else "|idle|none", gpus, mig) == ""


def test_gpu_check_accepts_a_corrupted_inforom(tmp_path: Path) -> None:
    assert check(tmp_path, "gpu:2|idle|none", f"{WHOLE}\n{INFOROM}", status=14) == ""


@pytest.mark.parametrize("state", ["idle~", "idle#", "idle%", "idle!", "mixed#", "powering_down"])
def test_gpu_check_leaves_power_saving_alone(tmp_path: Path, state: str) -> None:
    assert check(tmp_path, f"gpu:4|{state}|none") == ""


@pytest.mark.parametrize(
    ("record", "call"),
    [
        ("gpu:4|drained|fan", ""),
        ("gpu:2|drained|fan", ""),
        ("gpu:4|drained|gpu_check: 1 of 4 GPUs respond", ""),
        ("gpu:2|drained|gpu_check: 1 of 2 GPUs respond", "update NodeName=a State=RESUME"),
        ("gpu:4|idle|was in DRAIN | Gres=gpu:0 State=DOWN", drain(2, 4)),
        ("gpu:2|drained|fan Reason=gpu_check: 1 of 2", ""),
        ("gpu:4|maint$|none", drain(2, 4)),
    ],
)
def test_gpu_check_keeps_the_reasons_of_others(tmp_path: Path, record: str, call: str) -> None:
    assert check(tmp_path, record) == call
