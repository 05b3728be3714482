"""The house rules that a program can check: who imports whom, and how long things may be."""

import ast
import configparser
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddp_slurm"

EVERY_RANK = (
    "errors",
    "user",
    "parent",
    "trust",
    "hostlist",
    "ask",
    "term_signal",
    "files",
    "console",
    "comm",
    "job_env",
    "launchers",
    "rank_env",
    "curve",
    "balance",
    "exchange",
    "predict",
)
"""Modules that every rank may import: they need the standard library only."""
SUBMITTING_SIDE = (
    *EVERY_RANK,
    "data",
    "schema",
    "slurm_client",
    "cluster",
    "job",
    "plan",
    "render",
    "ssh",
    "runs",
    "backends",
    "admin",
    "lab",
    "verify",
    "submit",
    "measure",
    "cli",
)
"""Rooms in order: each may import those before it."""
RANKS_SIDE = {
    "run": EVERY_RANK,
    "torchrun_agent": EVERY_RANK,
    "training": EVERY_RANK,
    "lightning": (*EVERY_RANK, "training"),
    "examples": (*EVERY_RANK, "training"),
}
"""What runs on the nodes, with the rooms that it may import."""
NEEDS_TORCH = ("training", "examples", "lightning", "torchrun_agent")

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
"""Without the docstring."""
MAX_PARAMETERS = 7
MAX_COLUMNS = 100


class Import(NamedTuple):
    """One imported module, and where."""

    path: Path
    line: int
    module: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: imports {self.module}"


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``plan`` for ddp_slurm.plan.table; empty for the package itself and for others."""
    first, _, rest = f"{module}.".partition(".")
    return rest.partition(".")[0] if first == "ddp_slurm" else ""


def imports(path: Path) -> Iterator[Import]:
    """All imports of a file, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(path, node.lineno, _imported_module(node, alias.name))


def _imported_module(node: ast.ImportFrom, name: str) -> str:
    """``from ddp_slurm.job import values`` imports a module, other names are in one."""
    module = "." * node.level + (node.module or "")
    submodule = PACKAGE.parent.joinpath(*module.split("."), name)
    is_a_module = submodule.is_dir() or submodule.with_suffix(".py").is_file()
    return f"{module}.{name}" if is_a_module else module


def may_import(room: str) -> tuple[str, ...]:
    """The rooms that a room may import."""
    if room in RANKS_SIDE:
        return RANKS_SIDE[room]
    return SUBMITTING_SIDE[: SUBMITTING_SIDE.index(room)]


def test_rooms_import_only_rooms_below_them() -> None:
    errors = []
    for path in sources():
        room = room_of(module_of(path))
        for one in imports(path):
            target = room_of(one.module)
            if target and target != room and target not in may_import(room):
                errors.append(one.where)
    assert not errors


def test_every_module_is_in_a_known_room() -> None:
    rooms = {room_of(module_of(path)) for path in sources()} - {""}
    assert rooms == {*SUBMITTING_SIDE, *RANKS_SIDE}


def _lines_for_type_hints(path: Path) -> set[int]:
    """The lines under ``if TYPE_CHECKING:``."""
    return {
        line
        for node in ast.walk(sources()[path])
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }


def test_imports_are_absolute_and_never_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        hints = _lines_for_type_hints(path)
        found = {one.module for one in imports(path) if one.line not in hints}
        assert not [module for module in found if module.startswith(".")], path
        ours = {module for module in found if room_of(module)}
        graph[module_of(path)] = ours - {module_of(path)}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_every_rank_needs_the_standard_library_only() -> None:
    files = [PACKAGE / f"{name}.py" for name in EVERY_RANK]
    known = sys.stdlib_module_names | {"ddp_slurm"}
    assert not [
        one.where
        for path in files
        for one in imports(path)
        if one.module.partition(".")[0] not in known
    ]


def test_the_submitting_side_never_imports_torch() -> None:
    errors = []
    for path in sources():
        if room_of(module_of(path)) in NEEDS_TORCH:
            continue
        torch = {"torch", "torchvision", "numpy", "lightning"}
        errors += [one.where for one in imports(path) if one.module.partition(".")[0] in torch]
    assert not errors


def test_every_room_is_described_in_one_sentence() -> None:
    one_sentence = re.compile(r"([^.]|\.(?=\S))+\.")
    errors = []
    for path, tree in sources().items():
        summary = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        if path.name == "__init__.py" and not one_sentence.fullmatch(" ".join(summary.split())):
            errors.append(f"{path.relative_to(ROOT)}: {summary!r}")
    assert not errors


def test_files_are_short() -> None:
    errors = []
    for path in sources():
        count = len(path.read_text().splitlines())
        if count > MAX_FILE_LINES:
            errors.append(f"{path.relative_to(ROOT)}: {count} lines")
    assert not errors


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}", node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function, its docstring not counted."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def test_functions_are_short() -> None:
    errors = [
        f"{where} has {code_lines(function)} lines"
        for where, function in functions()
        if code_lines(function) > MAX_FUNCTION_LINES
    ]
    assert not errors


def test_functions_have_few_parameters() -> None:
    errors = []
    for where, function in functions():
        arguments = function.args
        names = [one.arg for one in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            errors.append(f"{where} has {count} parameters")
    assert not errors


def test_lines_are_not_long() -> None:
    errors = []
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if len(line) > MAX_COLUMNS:
                errors.append(f"{path.relative_to(ROOT)}:{number}: {len(line)} columns")
    assert not errors


def test_the_formatter_is_never_switched_off() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    off = re.compile("# fmt: ?" + "(off|skip)")
    assert not [name for name in listed.stdout.split() if off.search((ROOT / name).read_text())]


def test_ranks_exchange_no_pickled_objects() -> None:
    """Who reaches a rank's port could send one, and it would run as the job's owner."""
    runs_code = re.compile(r"_object(_list)?$|^pickle\.loads?$|^(cloud)?pickle\.Unpickler$")
    errors = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and runs_code.search(ast.unparse(node.func))
    ]
    assert not errors


def test_every_folder_is_a_package_of_the_distribution() -> None:
    """pip installs the packages that setup.cfg lists; a checkout does not miss one."""
    listed = configparser.ConfigParser()
    listed.read(ROOT / "setup.cfg")
    packages = set(listed["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py")}
    assert {str(folder).replace("/", ".") for folder in folders} <= packages


def test_no_isdigit_before_int() -> None:
    """It accepts ``²``, of which int() makes an error; isdecimal() accepts what int() reads."""
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if ".isdigit()" in path.read_text()]
    assert found == []
