"""The GPUs of a node, as cluster.yaml and Slurm's gres describe them."""

import re
from dataclasses import dataclass
from typing import Any

from ddp_slurm.schema import fields
from ddp_slurm.schema.schema import Error, Schema, key, tuple_of


@dataclass(frozen=True, init=False)
class GpuModel(Schema):
    """GPUs of one model in one node: ``gpu:a100:4`` in Slurm's syntax, ``gpu:4`` without a type."""

    type: str | None = key(
        fields.gpu_type, None, "TYPE", "the type in Slurm's gres, such as a100; without it any GPU"
    )
    count: int = key(fields.gpu_count, 1, "N", "how many the node has")
    minors: tuple[int, ...] | None = key(
        tuple_of(fields.whole_number),
        None,
        "[N, ...]",
        "the numbers of the device files /dev/nvidiaN where they are not 0, 1, 2, ...",
    )

    def misfits(self) -> list[Error]:
        if self.minors is None or len(self.minors) == len(set(self.minors)) == self.count:
            return []
        problem = f"{list(self.minors)} are not {self.count} different numbers, one for each GPU"
        return [(("minors",), problem)]


def gpu_models(value: Any) -> tuple[GpuModel, ...]:
    """Reader of ``gpus``: ``4``, one mapping, or a list of mappings for several models."""
    if isinstance(value, str):
        _refuse_gres(value)
    if isinstance(value, dict):
        is_none = str(value.get("count", "1")) == "0"
        value = [] if is_none else [value]
    if not isinstance(value, list | tuple):
        count = 0 if value in (0, "0") else fields.gpu_count(value)
        value = [{"count": count}] if count else []
    if {} in value:
        raise ValueError("a mapping without keys; write {type: TYPE, count: N}, or a number")
    return _one_model_a_type(tuple_of(GpuModel.read)(value))


def _refuse_gres(value: str) -> None:
    gres = re.fullmatch(r"(?:gpu:)?(?!gpu:)([^\s:,]+):([0-9]+)", value)
    if gres:
        written = f"{{type: {gres[1]}, count: {gres[2]}}}"
        raise ValueError(f"{value!r} is Slurm's syntax; write {written}")


def _one_model_a_type(models: tuple[GpuModel, ...]) -> tuple[GpuModel, ...]:
    """Slurm takes the last of two ``gpu:a:N`` in one gres, and refuses ``gpu:N`` beside a type."""
    by_type: dict[str | None, list[GpuModel]] = {}
    for model in models:
        by_type.setdefault(model.type, []).append(model)
    if len(by_type) > 1 and None in by_type:
        raise ValueError(
            "some GPUs have a type and some have none; give all GPUs of the node a type, or none"
        )
    return tuple(_joined(same) for same in by_type.values())


def _joined(same: list[GpuModel]) -> GpuModel:
    if len(same) == 1:
        return same[0]
    minors = [number for model in same for number in model.minors or ()]
    count = sum(model.count for model in same)
    if minors and len(set(minors)) != count:
        raise ValueError(
            f"type {same[0].type}: minors {minors} are not {count} different numbers, "
            "one for each GPU"
        )
    return GpuModel(type=same[0].type, count=count, minors=minors or None)


def gres_text(gpus: tuple[GpuModel, ...]) -> str:
    """``gpu:a100:2,gpu:titan:1``, Slurm's gres; ``gpu:4`` without a type, empty without GPUs."""
    return ",".join(
        f"gpu:{model.type}:{model.count}" if model.type else f"gpu:{model.count}" for model in gpus
    )
