"""The reference pages, generated from the schemas, the parsers and the variables of the code."""

import ast
import importlib
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ddp_slurm import job_env
from ddp_slurm.cluster import GpuModel, machines
from ddp_slurm.job.options import JobOptions
from ddp_slurm.schema.schema import MISSING, Schema, keys_of

COMMANDS = """
submit
plan
status
logs
cancel
discover
data prepare
data serve
data check
doctor
cluster probe
cluster configs
cluster install
lab up
lab down
lab exec
lab kill
lab revive
lab status
""".strip().splitlines()

PYTHON_NAMES = {
    "Start and end": (
        "ddp_slurm.training.init_distributed",
        "ddp_slurm.training.World",
        "ddp_slurm.rank_env.RankEnv",
        "ddp_slurm.job_env.JobEnv",
    ),
    "Shares and gradients": (
        "ddp_slurm.training.BalancedSampler",
        "ddp_slurm.training.BalancedIterable",
        "ddp_slurm.training.split_batch",
        "ddp_slurm.training.equal_shares",
        "ddp_slurm.training.verify",
        "ddp_slurm.training.GradientCheck",
        "ddp_slurm.training.loss_weight",
        "ddp_slurm.training.no_sample_loss",
        "ddp_slurm.training.BatchNormStatistics",
    ),
    "Snapshots and the Trainer": (
        "ddp_slurm.training.Snapshot",
        "ddp_slurm.training.Trainer",
    ),
    "From a cluster to a job script": (
        "ddp_slurm.cluster.Cluster",
        "ddp_slurm.plan.make_plan",
        "ddp_slurm.plan.Plan",
        "ddp_slurm.render.render_sbatch",
        "ddp_slurm.hostlist.expand_hostlist",
        "ddp_slurm.hostlist.expand_tasks_per_node",
    ),
}


def write_pages(folder: Path) -> None:
    """Write all pages into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "job_yaml": job_yaml_page(),
        "cluster_yaml": cluster_yaml_page(),
        "command_line": command_line_page(),
        "variables": variables_page(),
        "python": python_page(),
    }
    for name, lines in pages.items():
        (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def job_yaml_page() -> Iterable[str]:
    yield "# job.yaml"
    yield ""
    yield (
        "The options of one job. Each key is also an option of `submit` and `plan`, where it is"
        " written with `--`; an option wins over the key. `env`, `setup`, `mount` and `sbatch` of"
        " both add up."
    )
    yield ""
    yield from key_table(JobOptions, separator="-")


def cluster_yaml_page() -> Iterable[str]:
    yield "# cluster.yaml"
    yield ""
    yield "The machines. One file serves the jobs, `ddp-slurm cluster` and the doctor."
    for title, schema in (
        ("The file", machines.ClusterFile),
        ("`nodes`: an item for each machine, or for many equal ones", machines.Node),
        ("`gpus`: a number, or models", GpuModel),
        ("`ssh`", machines.Ssh),
    ):
        yield from ("", f"## {title}", "")
        yield from key_table(schema)


def key_table(schema: type[Schema], separator: str = "_") -> Iterable[str]:
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for name, key in keys_of(schema).items():
        default = ""
        if key.default is MISSING:
            default = " **Needed.**"
        elif key.default not in (None, (), {}):
            default = f" Default: `{key.default}`."
        metavar = f"`{key.metavar}`" if key.metavar else ""
        cells = [f"`{name.replace('_', separator)}`", metavar, f"{key.help}{default}"]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def command_line_page() -> Iterable[str]:
    yield "# Command line"
    yield ""
    yield (
        "`ddp-slurm COMMAND`; `python -m ddp_slurm.submit` is the same as `ddp-slurm submit`."
        " Exit status 2: something that was asked for cannot be done, with the reason on standard"
        " error."
    )
    for command in COMMANDS:
        yield from ("", f"## ddp-slurm {command}", "", "```text")
        yield help_of(command)
        yield "```"


def help_of(command: str) -> str:
    argv = [sys.executable, "-m", "ddp_slurm.cli", *command.split(), "--help"]
    environ = {**os.environ, "COLUMNS": "96"}
    return subprocess.run(
        argv, env=environ, capture_output=True, text=True, check=True
    ).stdout.strip()


def variables_page() -> Iterable[str]:
    yield "# Variables"
    yield ""
    yield "What a job tells its ranks. `ddp_slurm.job_env.JobEnv` reads them."
    yield ""
    yield "| variable | meaning |"
    yield "|---|---|"
    for text in field_docstrings(job_env.JobEnv).values():
        name, _, meaning = text.partition(":")
        yield f"| `{name}` | {' '.join(meaning.split())} |"


def field_docstrings(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, text in itertools.pairwise(body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        if is_field and isinstance(text.value, ast.Constant):
            texts[field.target.id] = text.value.value
    return texts


def python_page() -> Iterable[str]:
    yield "# Python"
    yield ""
    for title, names in PYTHON_NAMES.items():
        yield from (f"## {title}", "")
        for name in names:
            module, _, attribute = name.rpartition(".")
            is_class = inspect.isclass(getattr(importlib.import_module(module), attribute))
            kind = "autoclass" if is_class else "autofunction"
            yield from ("```{eval-rst}", f".. {kind}:: {name}")
            if is_class:
                yield "   :members:"
            yield from ("```", "")
