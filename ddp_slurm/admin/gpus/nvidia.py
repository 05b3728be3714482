"""NVIDIA's cards, from nvidia-smi and the kernel module's pages in /proc."""

import re
from dataclasses import dataclass

from ddp_slurm.admin.gpus.gpu import Gpu, Outputs, successful_text


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of ``nvidia-smi --query-gpu=index,pci.bus_id,memory.total,driver_version,name``."""

    index: int
    bus_id: str
    memory: str
    """In MiB; ``[N/A]`` on machines whose CPUs and GPUs share one memory."""
    driver: str
    name: str
    """``[GPU is lost]`` and the like where the card does not respond."""

    @property
    def is_lost(self) -> bool:
        return self.name.startswith("[")


def nvidia_gpus(outputs: Outputs) -> list[Gpu]:
    """The cards, none at all where one is lost: the rest of the table is not the machine."""
    if any(nvidia_error(status, text) for status, text in outputs.get("nvidia-smi", ())):
        return []
    capabilities = _capabilities(successful_text(outputs, "nvidia-smi.capability"))
    minors = _device_minors(outputs)
    gpus = []
    for row in _rows(successful_text(outputs, "nvidia-smi")):
        bus_id = _short_bus_id(row.bus_id)
        gpu = Gpu(
            index=row.index,
            name=row.name,
            memory_mib=int(row.memory) if row.memory.isdigit() else 0,
            vendor="nvidia",
            minor=minors.get(bus_id),
            driver=row.driver,
            compute_capability=capabilities.get(row.index, ""),
            bus_id=bus_id,
        )
        gpus.append(gpu)
    return gpus


def nvidia_error(status: int, text: str) -> str | None:
    """What nvidia-smi prints where it failed or lost a card; None where all is well.

    >>> nvidia_error(0, "0, 00000000:17:00.0, [GPU is lost], [GPU is lost], [GPU is lost]")
    'GPU 0 at 00000000:17:00.0: [GPU is lost]'
    """
    for row in _rows(text):
        if row.is_lost:
            return f"GPU {row.index} at {row.bus_id}: {row.name}"
    if status == 0:
        return None
    for line in text.splitlines():
        if line.strip() and _parse_row(line) is None:
            return line
    return f"no message (exit status {status})"


def _rows(text: str) -> list[_Row]:
    """The rows of the table, without the warnings that nvidia-smi prints around it."""
    rows = [_parse_row(line) for line in text.splitlines()]
    return [row for row in rows if row is not None]


def _parse_row(line: str) -> _Row | None:
    parts = [part.strip() for part in line.split(",", 4)]
    if len(parts) != 5 or not parts[0].isdigit():
        return None
    index, bus_id, memory, driver, name = parts
    return _Row(int(index), bus_id, memory, driver, name)


def _capabilities(text: str) -> dict[int, str]:
    """Compute capability by index, from ``nvidia-smi --query-gpu=index,compute_cap``."""
    pairs = re.findall(r"^(\d+), *(\d+\.\d+) *$", text, re.MULTILINE)
    return {int(index): capability for index, capability in pairs}


def _device_minors(outputs: Outputs) -> dict[str, int]:
    """Minor number of the device file by bus id, from /proc/driver/nvidia/gpus/*/information."""
    minors = {}
    for _, text in outputs.get("nvidia.information", ()):
        bus = re.search(r"Bus Location:\s*(\S+)", text)
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if bus and minor:
            minors[_short_bus_id(bus[1])] = int(minor[1])
    return minors


def _short_bus_id(bus_id: str) -> str:
    """``00000000:3B:00.0`` (nvidia-smi) and ``0000:3b:00.0`` (the kernel) are the same slot."""
    return bus_id.lower()[-12:]
