"""The doctor's checks of GPUs and torch: one error at a time on three healthy nodes."""

from dataclasses import replace

import pytest

from ddp_slurm.admin.doctor.checks import diagnose
from ddp_slurm.admin.doctor.finding import Severity
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import GpuModel
from tests.doctor_facts import (
    CARDS,
    Case,
    assert_found,
    case,
    errors_and_warnings,
    healthy,
    nodes_text,
    replaced,
    snapshot,
    training,
)

E, W = Severity.ERROR, Severity.WARNING
ALL = tuple(CARDS)
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:00:00.0"
TWO_CARDS = "GPU 0: Tesla V100 (UUID: GPU-0)\nGPU 1: Tesla V100 (UUID: GPU-1)"
CASES = [
    case(
        "GPU count",
        E,
        "beta",
        "cluster.yaml has 2 GPUs, nvidia-smi shows 1",
        beta={"nvidia-smi": lambda text: text.splitlines()[0]},
    ),
    case(
        "GPU count",
        E,
        "beta",
        "slurm.conf has 3 GPUs",
        everywhere=nodes_text("gpu:2", "gpu:v100:3(S:0)"),
    ),
    case(
        "GPU count",
        W,
        "gamma",
        "slurm.conf has 1 GPUs, nvidia-smi shows 2",
        gamma={"nvidia-smi": healthy("alpha")["nvidia-smi"]},
    ),
    case("GPU count", E, "beta", "no nvidia-smi", beta={"nvidia-smi": None}),
    case(
        "cards compute",
        E,
        "beta",
        "torch finds 1 of 2 GPUs",
        beta={"training": training(cards="1", card_errors="")},
    ),
    case(
        "cards compute",
        E,
        "beta",
        "cuda:1: CUDA error: an illegal memory access",
        beta={
            "training": training(
                cards="1", card_errors="cuda:1: CUDA error: an illegal memory access"
            )
        },
    ),
    case(
        "cards compute",
        E,
        "beta",
        "driver on your system is too old",
        beta={
            "training": training(
                cards="0", card_errors="The NVIDIA driver on your system is too old (found 11040)"
            )
        },
    ),
    case(
        "munge key",
        E,
        "beta",
        "another munge key than alpha",
        beta={"unmunge!": "15 unmunge: Error: Invalid credential"},
    ),
    case(
        "GPU driver",
        E,
        "beta",
        "Driver/library version mismatch",
        beta={
            "nvidia-smi!": "18 Failed to initialize NVML: Driver/library version mismatch\n"
            "NVML library version: 550.54"
        },
    ),
    case(
        "GPU driver",
        E,
        "beta",
        r"kernel module 535\.171\.04, library 535\.183\.01",
        beta={"nvidia.module": replaced("535.183.01", "535.171.04")},
    ),
    case("node states", E, "beta", r"DOWN\*", everywhere=nodes_text("State=IDLE", "State=DOWN*")),
    case(
        "torch",
        E,
        "beta",
        "No module named 'torch'",
        beta={
            "training": 'facts {"python": "3.11.4", '
            '"torch_error": "ModuleNotFoundError: No module named \'torch\'"}'
        },
    ),
    case(
        "torch",
        W,
        ALL,
        "No module named",
        everywhere={"training": 'facts {"python": "3.11.4", "torch_error": "No module named"}'},
    ),
    case("torch", E, "beta", "python3 does not run", beta={"training": None}),
    case("torch", W, ALL, "python3 does not run", everywhere={"training": None}),
    case(
        "versions",
        E,
        "beta",
        r"different NCCL: 2\.21\.5 on gamma, alpha, 2\.19\.3 on beta",
        beta={"training": training(nccl="2.19.3")},
    ),
    case(
        "versions", E, "gamma", "different torch", gamma={"training": training(torch="2.5.1+cu124")}
    ),
    case(
        "versions",
        E,
        "gamma",
        "different Python: 3.10 on gamma",
        gamma={"training": training(python="3.10.12")},
    ),
    case(
        "driver branch",
        W,
        "gamma",
        "550 on gamma",
        gamma={"nvidia-smi": replaced("535.183.01", "550.54.15"), "nvidia.module": None},
    ),
    case(
        "cards served",
        E,
        "gamma",
        r"torch 2\.8\S* has no code for NVIDIA TITAN V \(compute capability 7\.0\)",
        gamma={
            "training": training(torch="2.8.0+cu128", architectures="sm_75 sm_80 sm_90 compute_90")
        },
    ),
    case(
        "glibc",
        W,
        "gamma",
        r"glibc 2\.27; .*2\.7",
        gamma={"libc": ["glibc 2.27"], "os": ["ubuntu-18.04"]},
    ),
    case(
        "GPU driver",
        E,
        "beta",
        r"kernel module 580\.159\.04, library 535\.183\.01",
        beta={
            "nvidia.module": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  "
            "Release Build  (nixbld@)"
        },
    ),
    case(
        "GPU driver",
        W,
        "beta",
        "infoROM is corrupted at gpu",
        beta={"nvidia-smi!": f"14 {healthy('beta')['nvidia-smi']}\n{INFOROM}"},
    ),
    case(
        "GPU driver",
        E,
        "beta",
        "MIG is enabled on GPU 1, but it has no instances",
        beta={"nvidia-smi.mig": "0, Disabled\n1, Enabled", "nvidia-smi.list": TWO_CARDS},
    ),
    case(
        "GPU count",
        E,
        "beta",
        "slurm.conf has 4 GPUs, nvidia-smi shows 3",
        beta={
            "nvidia-smi.mig": "0, Disabled\n1, Enabled",
            "nvidia-smi.list": f"{TWO_CARDS}\n  MIG 1g.5gb Device 0:\n  MIG 1g.5gb Device 1:",
        },
        everywhere=nodes_text("gpu:2", "gpu:v100:1,gpu:1g.5gb:3"),
    ),
    case(
        "torch's CUDA",
        E,
        ALL,
        "python3 has a torch for CPUs only",
        everywhere={"training": training(torch="2.6.0+cpu", cuda="none")},
    ),
    case(
        "torch's CUDA",
        E,
        ALL,
        r"CUDA 13\.0 needs driver 580 or later, 535\.183\.01 is installed",
        everywhere={"training": training(torch="2.11.0+cu130", cuda="13.0")},
    ),
    case(
        "torch",
        E,
        ALL,
        r"python3 is Python 3\.8\.10; ddp_slurm needs 3\.10",
        everywhere={"training": training(python="3.8.10", ddp_slurm="none")},
    ),
    case(
        "torch",
        W,
        "beta",
        "python3 does not have ddp_slurm",
        beta={"training": training(ddp_slurm="none")},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_doctor_names_node_cause_and_fix(case: Case) -> None:
    assert_found(case)


def test_driver_with_corrupted_inforom_still_counts() -> None:
    text = f"14 {healthy('beta')['nvidia-smi']}\n{INFOROM}"
    findings = errors_and_warnings(snapshot(beta={"nvidia-smi!": text}))
    assert [(f.check, f.severity) for f in findings] == [("GPU driver", W)]


def test_gpu_count_counts_mig_instances() -> None:
    seen = snapshot(
        beta={
            "nvidia-smi.mig": "0, Disabled\n1, Enabled",
            "nvidia-smi.list": f"{TWO_CARDS}\n  MIG 1g.5gb Device 0:\n  MIG 1g.5gb Device 1:",
        },
        everywhere=nodes_text("gpu:2", "gpu:v100:1,gpu:1g.5gb:2"),
    )
    gpus = (GpuModel(type="v100"), GpuModel(type="1g.5gb", count=2))
    nodes = [n._replace(gpus=gpus) if n.name == "beta" else n for n in seen.cluster.nodes]
    seen = replace(seen, cluster=replace(seen.cluster, nodes=tuple(nodes)))
    assert errors_and_warnings(seen) == []
    assert diagnose(seen)


def test_a_card_in_use_is_no_error() -> None:
    busy = training(cards="1", card_errors="cuda:1: CUDA error: out of memory")
    findings = [f for f in diagnose(snapshot(beta={"training": busy})) if f.nodes == ("beta",)]
    assert [(f.check, f.severity) for f in findings] == [("cards compute", Severity.SKIPPED)]


def test_all_reduce_reports_its_bandwidth_or_the_rank() -> None:
    (well,) = [f for f in diagnose(snapshot()) if f.check == "all-reduce"]
    assert well.cause == "over 5 ranks with nccl: 1.10 GB/s on each link"
    out = (
        "rank 0 on gamma: cuda:0, NVIDIA TITAN V computes\nrank 1 on beta: cuda:0 fails: no kernel"
    )
    failed = replace(snapshot(), proof=Answer(1, out, "srun: error: beta: task 0: Exited"))
    (finding,) = [f for f in diagnose(failed) if f.check == "all-reduce"]
    assert (finding.severity, finding.cause) == (E, "rank 1 on beta: cuda:0 fails: no kernel")


def test_the_cure_of_a_wheel_serves_every_card() -> None:
    """A wheel for beta's cards that loses alpha's would be no cure."""
    wrong = snapshot(
        beta={"nvidia-smi.capability": "0, 5.2\n1, 5.2"},
        everywhere={"training": training(architectures="sm_75 sm_80 sm_90")},
    )
    fixes = {f.fix for f in diagnose(wrong) if f.check == "cards served"}
    index = "https://download.pytorch.org/whl/cu126"
    command = f"python3 -m pip install --force-reinstall torch torchvision --index-url {index}"
    assert fixes == {f"on all nodes: {command}"}
