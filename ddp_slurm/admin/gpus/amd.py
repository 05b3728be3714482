"""AMD's cards, from amd-smi or, before ROCm 6, rocm-smi."""

import json
import re
from typing import Any

from ddp_slurm.admin.gpus.gpu import Gpu, Outputs, successful_text


def amd_gpus(outputs: Outputs) -> list[Gpu]:
    cards = _from_amd_smi(successful_text(outputs, "amd-smi"))
    return cards or _from_rocm_smi(successful_text(outputs, "rocm-smi"))


def _from_amd_smi(text: str) -> list[Gpu]:
    data = _json(text)
    if isinstance(data, dict):  # since ROCm 6.4
        data = data.get("gpu_data")
    cards = data or []
    return [_amd_smi_card(number, _mapping(card)) for number, card in enumerate(cards)]


def _amd_smi_card(number: int, card: dict[str, Any]) -> Gpu:
    index = str(card.get("gpu"))
    asic = _mapping(card.get("asic"))
    vram = _mapping(card.get("vram"))
    size = vram.get("size", vram.get("vram_size_mb"))
    megabytes = str(size.get("value") if isinstance(size, dict) else size)
    return Gpu(
        index=int(index) if index.isdecimal() else number,
        name=str(asic.get("market_name", "AMD GPU")),
        memory_mib=int(megabytes) if megabytes.isdecimal() else 0,
        vendor="amd",
        driver=str(_mapping(card.get("driver")).get("version", "")),
        compute_capability=str(asic.get("target_graphics_version", "")),
        bus_id=str(_mapping(card.get("bus")).get("bdf", "")).lower(),
    )


def _from_rocm_smi(text: str) -> list[Gpu]:
    data = _mapping(_json(text))
    driver = str(_mapping(data.get("system")).get("Driver version", ""))
    gpus = []
    for key, card in data.items():
        match = re.fullmatch(r"card(\d+)", key)
        if match:
            gpus.append(_rocm_smi_card(int(match[1]), _mapping(card), driver))
    return sorted(gpus, key=lambda gpu: gpu.index)


def _rocm_smi_card(index: int, card: dict[str, Any], driver: str) -> Gpu:
    # the capitals changed with ROCm 6
    values = {key.lower(): str(value) for key, value in card.items()}
    memory_bytes = values.get("vram total memory (b)", "0")
    return Gpu(
        index=index,
        name=values.get("card series", "AMD GPU"),
        memory_mib=int(memory_bytes) // 2**20 if memory_bytes.isdecimal() else 0,
        vendor="amd",
        driver=driver,
        compute_capability=values.get("gfx version", ""),
        bus_id=values.get("pci bus", "").lower(),
    )


def _json(text: str) -> Any:
    """The first value in a text that may begin with warnings; None without one."""
    start = re.search(r"[\[{]", text)
    if start is None:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start.start())
    except ValueError:
        return None
    return value


def _mapping(value: Any) -> dict[str, Any]:
    """The tools print "N/A" in place of a part that they cannot read."""
    return value if isinstance(value, dict) else {}
