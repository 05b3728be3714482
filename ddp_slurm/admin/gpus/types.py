"""The gres type of a card, from its name."""

import re
from collections.abc import Iterable

_NOISE = re.compile(
    r"\b(NVIDIA|GeForce|Tesla|Quadro|AMD|ATI|Instinct|Radeon|Graphics|GPU|Generation"
    r"|PCIe|PCI-?E|HBM\w*|NVL|\d+ ?GB)\b",
    re.IGNORECASE,
)

_MIG_PROFILE = re.compile(r"(?:^|[ _])((?:\d+c\.)?\d+g\.\d+gb\S*)$")


def mig_profile_of(type: str | None) -> str | None:
    """``1g.10gb`` of a gres type that is an instance of a divided card, or of its name."""
    match = _MIG_PROFILE.search(type or "")
    return match[1] if match else None


def gres_types(names: Iterable[str]) -> dict[str, str]:
    """A short gres type for each card name.

    It is a part of the name that Slurm detects (``nvidia_geforce_rtx_3090``), as AutoDetect
    requires. Names that would share a type (an A100 of 40 and one of 80 GB) stay whole.

    >>> gres_types(["NVIDIA GeForce RTX 3090", "Tesla V100-SXM2-16GB"])
    {'NVIDIA GeForce RTX 3090': 'rtx_3090', 'Tesla V100-SXM2-16GB': 'v100'}
    """
    short = {name: _short_type(name) for name in names}
    all_types = list(short.values())
    types = {}
    for name, short_type in short.items():
        is_unique = all_types.count(short_type) == 1
        types[name] = short_type if is_unique else _as_type(name)
    return types


def _short_type(name: str) -> str:
    profile = mig_profile_of(name)
    if profile:
        return _as_type(profile)
    bracket = re.search(r"\[(.*)\]", name)  # rocm-smi: "Arcturus GL-XL [AMD Instinct MI100]"
    text = bracket[1] if bracket else name
    text = re.sub(r"\(.*?\)", " ", text)
    text = re.sub(r"-\S*", " ", text)
    kept = _NOISE.sub(" ", text)
    return _as_type(kept if re.search("[a-z0-9]", kept.lower()) else name)


def _as_type(name: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "_", name.lower()).strip("_.-") or "gpu"
