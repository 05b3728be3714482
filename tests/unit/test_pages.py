"""All pages of the repository: their links lead somewhere, their code blocks can be read."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for path in ROOT.glob("*/*.md") if path.parent.name != "build"),
    ]
)
FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1\s*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {"docs/reference/rooms.svg"}
"""Files that exist in the built site only."""


def prose(text: str) -> str:
    """The page without its code, in which brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def heading_anchors(text: str) -> set[str]:
    """The anchors that a forge and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_blocks(*languages: str) -> list[object]:
    """A parameter (path, code) for each block of these languages."""
    return [
        pytest.param(path, match[3], id=f"{page_id(path)}-{number}")
        for path in PAGES
        for number, match in enumerate(FENCE.finditer(path.read_text()))
        if match[2] in languages
    ]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    dead = []
    for target in LINK.findall(prose(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        is_missing = not file.exists() and page_id(file) not in GENERATED
        if is_missing or (anchor and anchor not in heading_anchors(file.read_text())):
            dead.append(target)
    assert dead == []


@pytest.mark.parametrize(("path", "code"), code_blocks("python"))
def test_python_blocks_compile(path: Path, code: str) -> None:
    ast.parse(code)


@pytest.mark.parametrize(("path", "code"), code_blocks("yaml"))
def test_yaml_blocks_load(path: Path, code: str) -> None:
    assert yaml.load(code, yaml.BaseLoader)


def commands_of(path: Path, code: str) -> str:
    """The lines that a reader types: all of a bash block, those after ``$`` of a console block."""
    if not re.search(r"^\$ ", code, re.MULTILINE):
        return code
    typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", code, re.MULTILINE)
    return "\n".join(typed)


@pytest.mark.parametrize(("path", "code"), code_blocks("bash", "console", "sh"))
def test_shell_blocks_parse(path: Path, code: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=commands_of(path, code), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_only_code_languages_are_checked_ones() -> None:
    known = {"python", "yaml", "bash", "console", "sh", "text", "", "{toctree}", "{eval-rst}"}
    found = {match[2] for path in PAGES for match in FENCE.finditer(path.read_text())}
    assert found <= known
