"""GPUs out of the vendors' tools: nvidia-smi, and AMD's amd-smi or rocm-smi."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Outputs = Mapping[str, Sequence[tuple[int, str]]]
"""Exit status and text of each command, by the name that cluster_setup/facts.sh gives it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. ``minor`` is the N of its device file, which need not be its index; None where nothing told it."""

    index: int
    name: str
    memory_mib: int
    vendor: str
    minor: int | None = None
    driver: str = ""
    compute_capability: str = ""
    """``8.6`` for NVIDIA, ``gfx90a`` for AMD."""
    bus_id: str = ""


def parse_gpus(outputs: Outputs) -> tuple[Gpu, ...]:
    """The cards that the tools list, NVIDIA's first, in the tools' order."""
    amd = _amd_smi(_answer(outputs, "amd-smi")) or _rocm_smi(_answer(outputs, "rocm-smi"))
    return (*_nvidia(outputs), *amd)


def _answer(outputs: Outputs, name: str) -> str:
    return "\n".join(text for status, text in outputs.get(name, ()) if status == 0)


def _nvidia(outputs: Outputs) -> list[Gpu]:
    capabilities = dict(
        line.split(", ", 1)
        for line in _answer(outputs, "nvidia-smi.capability").splitlines()
        if ", " in line
    )
    minors = _device_minors(outputs)
    if any(nvidia_fault(status, text) for status, text in outputs.get("nvidia-smi", ())):
        return []  # the rest of the table after a card was lost is not the machine
    gpus: list[Gpu] = []
    for index, bus_id, memory, driver, name in _rows(_answer(outputs, "nvidia-smi")):
        capability = capabilities.get(index, "").strip()
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                memory_mib=int(memory)
                if memory.isdigit()
                else 0,  # "[N/A]" on machines with one shared memory
                vendor="nvidia",
                minor=minors.get(_short_bus_id(bus_id)),
                driver=driver,
                compute_capability=capability if re.fullmatch(r"\d+\.\d+", capability) else "",
                bus_id=_short_bus_id(bus_id),
            )
        )
    return gpus


def _rows(text: str) -> list[list[str]]:
    """The five fields of each card, without the warnings that nvidia-smi prints around its table."""
    rows = [[part.strip() for part in line.split(",", 4)] for line in text.splitlines()]
    return [row for row in rows if len(row) == 5 and row[0].isdigit()]


def nvidia_fault(status: int, text: str) -> str | None:
    """What nvidia-smi says where it failed or lost a card; None where all is well.

    >>> nvidia_fault(0, "0, 00000000:17:00.0, [GPU is lost], [GPU is lost], [GPU is lost]")
    'GPU 0 at 00000000:17:00.0: [GPU is lost]'
    """
    rows = _rows(text)
    lost = [f"GPU {row[0]} at {row[1]}: {row[4]}" for row in rows if row[4].startswith("[")]
    said = [line for line in text.splitlines() if line.strip() and not _rows(line)]
    if status == 0:
        return lost[0] if lost else None
    return next(iter([*lost, *said]), f"it says nothing (exit status {status})")


def _device_minors(outputs: Outputs) -> dict[str, int]:
    """Minor number of each bus id, from the kernel module's own pages in /proc."""
    minors = {}
    for _, text in outputs.get("nvidia.information", ()):
        bus, minor = (
            re.search(r"Bus Location:\s*(\S+)", text),
            re.search(r"Device Minor:\s*(\d+)", text),
        )
        if bus and minor:
            minors[_short_bus_id(bus[1])] = int(minor[1])
    return minors


def _short_bus_id(bus_id: str) -> str:
    """``00000000:3B:00.0`` (nvidia-smi) and ``0000:3b:00.0`` (the kernel) are the same slot."""
    return bus_id.lower()[-12:]


def _json(text: str) -> Any:
    start = min((text.find(c) for c in "[{" if c in text), default=-1)
    try:
        return json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    except ValueError:
        return None


def _mapping(value: Any) -> dict[str, Any]:
    """The tools print "N/A" in place of a part that they cannot read."""
    return value if isinstance(value, dict) else {}


def _amd_smi(text: str) -> list[Gpu]:
    data = _json(text)
    cards = (
        data.get("gpu_data", []) if isinstance(data, dict) else data or []
    )  # wrapped since ROCm 6.4
    gpus: list[Gpu] = []
    for number, card in enumerate(map(_mapping, cards)):
        asic, vram, bus, driver = (
            _mapping(card.get(part)) for part in ("asic", "vram", "bus", "driver")
        )
        index = str(card.get("gpu"))
        size = vram.get("size", vram.get("vram_size_mb", 0))
        megabytes = size.get("value", 0) if isinstance(size, dict) else size
        gpus.append(
            Gpu(
                index=int(index) if index.isdigit() else number,
                name=str(asic.get("market_name", "AMD GPU")),
                memory_mib=int(megabytes) if str(megabytes).isdigit() else 0,
                vendor="amd",
                driver=str(driver.get("version", "")),
                compute_capability=str(asic.get("target_graphics_version", "")),
                bus_id=str(bus.get("bdf", "")).lower(),
            )
        )
    return gpus


def _rocm_smi(text: str) -> list[Gpu]:
    data = _mapping(_json(text))
    cards = {k: _mapping(v) for k, v in data.items() if re.fullmatch(r"card\d+", k)}
    driver = str(_mapping(data.get("system")).get("Driver version", ""))
    gpus: list[Gpu] = []
    for card, about in sorted(cards.items(), key=lambda item: int(item[0][4:])):
        known = {
            key.lower(): str(value) for key, value in about.items()
        }  # the capitals changed with ROCm 6
        memory = known.get("vram total memory (b)", "0")
        gpus.append(
            Gpu(
                index=int(card[4:]),
                name=known.get("card series", "AMD GPU"),
                memory_mib=int(memory) // 2**20 if memory.isdigit() else 0,
                vendor="amd",
                driver=driver,
                compute_capability=known.get("gfx version", ""),
                bus_id=known.get("pci bus", "").lower(),
            )
        )
    return gpus


def gres_types(names: Iterable[str]) -> dict[str, str]:
    """A short gres type for each card name.

    >>> gres_types(["NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "Tesla V100-SXM2-16GB", "NVIDIA TITAN X (Pascal)"])
    {'NVIDIA A100-SXM4-80GB': 'a100', 'NVIDIA GeForce RTX 3090': 'rtx_3090', 'Tesla V100-SXM2-16GB': 'v100', 'NVIDIA TITAN X (Pascal)': 'titan_x'}

    It is a part of the name that Slurm detects (``nvidia_geforce_rtx_3090``), which AutoDetect asks for. Two names
    that would share a type (an A100 of 40 and one of 80 GB) keep their whole name.
    """  # noqa: E501
    short = {name: _short_type(name) for name in dict.fromkeys(names)}
    shared = {t for t in short.values() if list(short.values()).count(t) > 1}
    return {name: _plain_type(name) if t in shared else t for name, t in short.items()}


_NOISE = r"\b(NVIDIA|GeForce|Tesla|Quadro|AMD|ATI|Instinct|Radeon|Graphics|GPU|Generation|PCIe|PCI-?E|HBM\w*|NVL|\d+ ?GB)\b"


def _short_type(name: str) -> str:
    bracket = re.search(r"\[(.*)\]", name)  # rocm-smi: "Arcturus GL-XL [AMD Instinct MI100]"
    text = re.sub(r"\(.*?\)", " ", bracket[1] if bracket else name)
    text = re.sub(_NOISE, " ", re.sub(r"-\S*", " ", text), flags=re.IGNORECASE)
    return _plain_type(text) or _plain_type(name)


def _plain_type(name: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "_", name.lower()).strip("_.-")
