"""NVIDIA's cards, from nvidia-smi and the kernel module's pages in /proc."""

import re
from dataclasses import dataclass, replace

from ddp_slurm.admin.gpus.gpu import Gpu, Outputs

INFOROM_CORRUPTED = 14
"""nvidia-smi(1), RETURN VALUE: a warning; all queries are answered, and the card computes."""


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
    """The cards; in place of a divided one (MIG) its instances, which may be none.

    None at all where a card is lost: the rest of the table is not the machine.
    """
    if any(nvidia_error(status, text) for status, text in outputs.get("nvidia-smi", ())):
        return []
    instances = _mig_profiles(outputs)
    gpus = []
    for card in _cards(outputs):
        if card.index not in instances:
            gpus.append(card)
        for profile in instances.get(card.index, ()):
            gpus.append(_instance(card, profile))
    return gpus


def _cards(outputs: Outputs) -> list[Gpu]:
    """Whole cards."""
    capabilities = _capabilities(_text(outputs, "nvidia-smi.capability"))
    minors = _device_minors(outputs)
    gpus = []
    for row in _rows(_text(outputs, "nvidia-smi")):
        bus_id = _short_bus_id(row.bus_id)
        gpu = Gpu(
            index=row.index,
            name=row.name,
            memory_mib=int(row.memory) if row.memory.isdecimal() else 0,
            vendor="nvidia",
            minor=minors.get(bus_id),
            driver=row.driver,
            compute_capability=capabilities.get(row.index, ""),
            bus_id=bus_id,
        )
        gpus.append(gpu)
    return gpus


def _instance(card: Gpu, profile: str) -> Gpu:
    gigabytes = re.search(r"(\d+)gb", profile)
    memory_mib = int(gigabytes[1]) * 1024 if gigabytes else 0
    name = f"{card.name} {profile}"
    return replace(card, name=name, memory_mib=memory_mib, mig_profile=profile)


def _mig_profiles(outputs: Outputs) -> dict[int, list[str]]:
    """The profiles of the instances of each divided card, by its index."""
    profiles: dict[int, list[str]] = {}
    listed = _text(outputs, "nvidia-smi.list")
    if not listed:
        return profiles
    for index in re.findall(r"^(\d+), *Enabled", _text(outputs, "nvidia-smi.mig"), re.MULTILINE):
        profiles[int(index)] = []
    card = -1
    for line in listed.splitlines():
        card_line = re.match(r"GPU (\d+):", line)
        instance_line = re.match(r" +MIG (\S+)", line)
        if card_line:
            card = int(card_line[1])
        elif instance_line:
            profiles.setdefault(card, []).append(instance_line[1])
    return profiles


def undivided_mig_cards(outputs: Outputs) -> list[int]:
    """The indices of cards with MIG enabled but without instances: no program can use them."""
    return [index for index, profiles in _mig_profiles(outputs).items() if not profiles]


def nvidia_warning(status: int, text: str) -> str | None:
    """The message of an nvidia-smi that has a complaint but works."""
    if status != INFOROM_CORRUPTED:
        return None
    return _first_message(text) or "infoROM is corrupted"


def nvidia_error(status: int, text: str) -> str | None:
    """What nvidia-smi prints where it failed or lost a card; None where all is well.

    >>> nvidia_error(0, "0, 00000000:17:00.0, [GPU is lost], [GPU is lost], [GPU is lost]")
    'GPU 0 at 00000000:17:00.0: [GPU is lost]'
    """
    for row in _rows(text):
        if row.is_lost:
            return f"GPU {row.index} at {row.bus_id}: {row.name}"
    works = status == 0 or (status == INFOROM_CORRUPTED and _rows(text))
    if works:
        return None
    return _first_message(text) or f"no message (exit status {status})"


def _first_message(text: str) -> str | None:
    for line in text.splitlines():
        if line.strip() and _parse_row(line) is None:
            return line
    return None


def _text(outputs: Outputs, name: str) -> str:
    """What a query of nvidia-smi printed where it worked."""
    works = (0, INFOROM_CORRUPTED)
    return "\n".join(text for status, text in outputs.get(name, ()) if status in works)


def _rows(text: str) -> list[_Row]:
    """The rows of the table, without the warnings that nvidia-smi prints around it."""
    rows = [_parse_row(line) for line in text.splitlines()]
    return [row for row in rows if row is not None]


def _parse_row(line: str) -> _Row | None:
    parts = [part.strip() for part in line.split(",", 4)]
    if len(parts) != 5 or not parts[0].isdecimal():
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
