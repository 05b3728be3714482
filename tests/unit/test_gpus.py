"""GPUs, from recorded outputs of the vendors' tools."""

import pytest

from ddp_slurm.admin.gpus import gres_types, nvidia_error, nvidia_warning, parse_gpus
from ddp_slurm.admin.probed_cluster import gpu_models
from ddp_slurm.cluster import GpuModel

# Two kinds of card; the order of nvidia-smi (by bus) is not that of the device files.
NVIDIA_SMI = """\
0, 00000000:17:00.0, 81920, 550.54.15, NVIDIA A100-SXM4-80GB
1, 00000000:65:00.0, 24564, 550.54.15, NVIDIA GeForce RTX 3090
2, 00000000:CA:00.0, 81920, 550.54.15, NVIDIA A100-SXM4-80GB"""
CAPABILITY = "0, 8.0\n1, 8.6\n2, 8.0"
INFORMATION = (
    "Model: \t\t {}\nIRQ:   \t\t 33\nBus Location: \t 0000:{}:00.0\nDevice Minor: \t {}\n"
    "GPU Excluded:\t No"
)
AMD_SMI = """[{"gpu": 0,
 "asic": {"market_name": "AMD Instinct MI210", "target_graphics_version": "gfx90a"},
 "bus": {"bdf": "0000:43:00.0"}, "vram": {"type": "HBM2E", "size": {"value": 65520, "unit": "MB"}},
 "driver": {"name": "amdgpu", "version": "6.7.0"}}]"""
ROCM_SMI = """WARNING: AMD GPU device(s) is/are in a low-power state.
{"card0": {"VRAM Total Memory (B)": "21458059264", "PCI Bus": "0000:03:00.0",
 "Card Series": "Radeon RX 7900 XT",
 "Card Model": "0x744c", "GFX Version": "gfx1100"}, "system": {"Driver version": "6.8.5"}}"""

MIG_MODE = "0, Enabled\n1, Disabled\n2, Enabled"
MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-7fdaf0a5)
  MIG 3g.40gb     Device  0: (UUID: MIG-feb88891)
  MIG 1g.10gb     Device  1: (UUID: MIG-a25704ba)
  MIG 1g.10gb     Device  2: (UUID: MIG-36c795f2)
GPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-3f45d38c)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-6aae4990)"""
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:17:00.0"


def test_nvidia_cards_have_their_device_minors() -> None:
    information = [
        (0, INFORMATION.format("A100", "17", 1)),
        (0, INFORMATION.format("3090", "65", 0)),
        (0, INFORMATION.format("A100", "ca", 2)),
    ]
    outputs = {
        "nvidia-smi": [(0, NVIDIA_SMI)],
        "nvidia-smi.capability": [(0, CAPABILITY)],
        "nvidia.information": information,
    }
    cards = parse_gpus(outputs)
    assert [(c.minor, c.memory_mib, c.compute_capability, c.driver) for c in cards] == [
        (1, 81920, "8.0", "550.54.15"),
        (0, 24564, "8.6", "550.54.15"),
        (2, 81920, "8.0", "550.54.15"),
    ]
    models = gpu_models(cards, gres_types(card.name for card in cards))
    assert models == (
        GpuModel(type="a100", count=2, minors=(1, 2)),
        GpuModel(type="rtx_3090", count=1, minors=(0,)),
    )


@pytest.mark.parametrize("index", ["\u00b2", "-1", "0x1", "1.0", ""])
def test_nvidia_row_without_a_number_is_no_card(index: str) -> None:
    row = f"{index}, 00000000:01:00.0, 81920, 550.54.15, NVIDIA A100-SXM4-80GB"
    assert parse_gpus({"nvidia-smi": [(0, row)]}) == ()


def test_nvidia_old_and_failing_drivers() -> None:
    refused = (2, 'Field "compute_cap" is not a valid field to query.')
    old = {"nvidia-smi": [(0, "0, 00000000:01:00.0, 12212, 470.223.02, NVIDIA TITAN X (Pascal)")]}
    (card,) = parse_gpus({**old, "nvidia-smi.capability": [refused]})
    assert (card.compute_capability, card.memory_mib) == ("", 12212)
    assert gpu_models([card], {card.name: "titan_x"}) == (GpuModel(type="titan_x", count=1),)
    shared = {"nvidia-smi": [(0, "0, 0000000F:01:00.0, [N/A], 580.95.05, NVIDIA GB10")]}
    assert parse_gpus(shared)[0].memory_mib == 0
    mismatch = (
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54"
    )
    assert parse_gpus({"nvidia-smi": [(18, mismatch)]}) == ()
    rest_of_table = {"nvidia-smi": [(15, NVIDIA_SMI)]}
    assert parse_gpus(rest_of_table) == ()
    lost = f"{NVIDIA_SMI}\n3, 00000000:DA:00.0, [GPU is lost], [GPU is lost], [GPU is lost]"
    assert parse_gpus({"nvidia-smi": [(0, lost)]}) == ()


@pytest.mark.parametrize(
    ("tool", "text", "found"),
    [
        ("amd-smi", AMD_SMI, ("AMD Instinct MI210", 65520, "gfx90a", "6.7.0", "0000:43:00.0")),
        (
            "amd-smi",
            '{"gpu_data": ' + AMD_SMI + "}",
            ("AMD Instinct MI210", 65520, "gfx90a", "6.7.0", "0000:43:00.0"),
        ),
        ("rocm-smi", ROCM_SMI, ("Radeon RX 7900 XT", 20464, "gfx1100", "6.8.5", "0000:03:00.0")),
    ],
)
def test_amd_cards_of_each_tool(
    tool: str, text: str, found: tuple[str, int, str, str, str]
) -> None:
    (card,) = parse_gpus({tool: [(0, text)]})
    assert (card.name, card.memory_mib, card.compute_capability, card.driver, card.bus_id) == found
    assert gpu_models([card], {card.name: "x"})[0].minors == (128,)  # /dev/dri/renderD128


@pytest.mark.parametrize(
    ("tool", "text", "count"),
    [
        (
            "amd-smi",
            '[{"gpu": "N/A", "asic": "N/A", "vram": "N/A", "bus": "N/A", "driver": "N/A"}]',
            1,
        ),
        ("amd-smi", '["N/A"]', 1),
        ("rocm-smi", '{"card0": "N/A", "system": "N/A"}', 1),
        ("rocm-smi", "[]", 0),
    ],
)
def test_amd_cards_without_readable_values_count(tool: str, text: str, count: int) -> None:
    assert len(parse_gpus({tool: [(0, text)]})) == count


def test_gres_types_are_short_and_unique() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA GeForce RTX 3090": "rtx_3090",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA RTX 6000 Ada Generation": "rtx_6000_ada",
        "Quadro P4000": "p4000",
        "NVIDIA TITAN X (Pascal)": "titan_x",
        "Arcturus GL-XL [AMD Instinct MI100]": "mi100",
        "NVIDIA GeForce GTX 1080 Ti": "gtx_1080_ti",
    }
    assert gres_types(names) == names
    two = gres_types(["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "Tesla V100-PCIE-16GB"])
    assert list(two.values()) == ["nvidia_a100-sxm4-40gb", "nvidia_a100-sxm4-80gb", "v100"]


def test_nvidia_mig_instances_take_the_place_of_their_card() -> None:
    outputs = {
        "nvidia-smi": [(0, NVIDIA_SMI)],
        "nvidia-smi.capability": [(0, CAPABILITY)],
        "nvidia-smi.mig": [(0, MIG_MODE)],
        "nvidia-smi.list": [(0, MIG_LIST)],
    }
    gpus = parse_gpus(outputs)
    assert [(gpu.index, gpu.mig_profile, gpu.memory_mib) for gpu in gpus] == [
        (0, "3g.40gb", 40960),
        (0, "1g.10gb", 10240),
        (0, "1g.10gb", 10240),
        (1, "", 24564),  # card 2 has no instances: no program can use it
    ]
    assert {gpu.compute_capability for gpu in gpus} == {"8.0", "8.6"}
    assert gpu_models(gpus, gres_types(gpu.name for gpu in gpus)) == (
        GpuModel(type="3g.40gb", count=1),
        GpuModel(type="1g.10gb", count=2),
        GpuModel(type="rtx_3090", count=1),
    )


def test_nvidia_whole_cards_without_mig_queries() -> None:
    refused = (2, 'Field "mig.mode.current" is not a valid field to query.')
    no_list = (255, "Unable to determine the device handle")
    table = {"nvidia-smi": [(0, NVIDIA_SMI)]}
    assert len(parse_gpus({**table, "nvidia-smi.mig": [refused]})) == 3
    old = {"nvidia-smi.mig": [(0, "0, [N/A]\n1, [N/A]\n2, [N/A]")], "nvidia-smi.list": [no_list]}
    assert len(parse_gpus({**table, **old})) == 3
    assert len(parse_gpus({**table, "nvidia-smi.mig": [(0, MIG_MODE)]})) == 3


def test_nvidia_mig_types_of_two_models_stay_whole() -> None:
    names = ["NVIDIA A100-SXM4-80GB 1g.10gb", "NVIDIA H100 PCIe 1g.10gb"]
    types = gres_types(names).values()
    assert list(types) == ["nvidia_a100-sxm4-80gb_1g.10gb", "nvidia_h100_pcie_1g.10gb"]


@pytest.mark.parametrize("table", [f"{NVIDIA_SMI}\n{INFOROM}", f"{INFOROM}\n{NVIDIA_SMI}"])
def test_nvidia_corrupted_inforom_is_a_warning(table: str) -> None:
    outputs = {
        "nvidia-smi": [(14, table)],
        "nvidia-smi.capability": [(14, f"{CAPABILITY}\n{INFOROM}")],
        "nvidia-smi.mig": [(14, MIG_MODE)],
        "nvidia-smi.list": [(14, f"{MIG_LIST}\n{INFOROM}")],
    }
    assert [gpu.compute_capability for gpu in parse_gpus(outputs)] == ["8.0", "8.0", "8.0", "8.6"]
    assert nvidia_error(14, table) is None
    assert nvidia_warning(14, table) == INFOROM
    assert nvidia_error(14, INFOROM) == INFOROM, "it shows no card"
    lost = f"{table}\n3, 00000000:DA:00.0, [GPU is lost], [GPU is lost], [GPU is lost]"
    assert nvidia_error(14, lost) == "GPU 3 at 00000000:DA:00.0: [GPU is lost]"
