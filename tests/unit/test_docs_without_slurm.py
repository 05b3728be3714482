"""docs/without_slurm.md and docs/recipes.md agree with the programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "without_slurm.md").read_text()


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """A folder with the page's cluster.yaml."""
    (tmp_path / "cluster.yaml").write_text(
        re.findall(r"```yaml\n(name: boxes.*?)```", TEXT, re.DOTALL)[0]
    )
    return tmp_path


def submit(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "ddp_slurm.submit", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dry_run_prints_the_lines_typed_by_hand(boxes: Path) -> None:
    lines = submit(
        boxes, "--backend", "torchrun", "--dry-run", "--", "python", "train.py", "5", "1"
    ).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# on box1 (me@192.168.8.151):",
        "# on box2 (me@192.168.8.152):",
    ]
    by_hand = re.findall(r"^torchrun (.*) --master-port=29500 (train.py 5 1)$", TEXT, re.MULTILINE)
    assert len(by_hand) == 2
    for (options, words), line in zip(by_hand, lines[1::2], strict=True):
        assert set(options.split()) <= set(line.split())
        assert line.endswith(f"{words} )")


def test_dry_run_prints_the_network_commands_of_the_page(boxes: Path) -> None:
    command, printed = re.findall(
        r"```console\n\$ python -m ddp_slurm.submit (.*?)\n(.*?)\.\.\.\n```", TEXT, re.DOTALL
    )[0]
    assert submit(boxes, *command.split()).startswith(printed)


def test_link_targets_exist() -> None:
    for page in ("without_slurm.md", "recipes.md"):
        for target in re.findall(r"\]\(([^)#]+)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), f"{page}: {target}"


def test_every_recipe_is_linked() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert all(f"(recipes/{file.name})" in text for file in (DOCS / "recipes").glob("*.py"))
