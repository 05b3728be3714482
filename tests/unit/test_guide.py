"""The set-up guide: every command block runs or parses, every option and link in it exists."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.admin.install import STEPS
from ddp_slurm.admin.slurm_releases import RELEASES
from ddp_slurm.cli import make_parser
from ddp_slurm.cluster import Cluster
from tests.guide import GUIDE, OF_ALL, OF_CONTROLLER, SHELL, TEXT, Block, blocks, is_other_way

KNOWN_COMMANDS = {
    "apt-config",
    "apt-get",
    "cat",
    "cd",
    "chmod",
    "chown",
    "conda",
    "ddp-slurm",
    "debuild",
    "echo",
    "exit",
    "exportfs",
    "git",
    "groupadd",
    "head",
    "hostnamectl",
    "install",
    "ip",
    "mk-build-deps",
    "mount",
    "munge",
    "nvidia-smi",
    "printf",
    "python",
    "python3",
    "reboot",
    "rsync",
    "scontrol",
    "source",
    "ssh",
    "ssh-copy-id",
    "ssh-keygen",
    "systemctl",
    "sh",
    "tar",
    "tee",
    "test",
    "touch",
    "ubuntu-drivers",
    "ufw",
    "umask",
    "unmunge",
    "useradd",
    "pip",
}
"""Commands of the guide, each checked once in its manual page. A new one must be added here."""


def commands(text: str) -> list[list[str]]:
    """The simple commands of a block, here documents and quoted scripts left out."""
    text = re.sub(r"<<'END'\n.*?\nEND\n", "\n", text, flags=re.S)
    words: list[list[str]] = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        tokens = list(lexer)
        current: list[str] = []
        for token in [*tokens, ";"]:
            if token in (
                "|",
                "||",
                "&&",
                ";",
                "do",
                "done",
                "if",
                "then",
                "fi",
            ) or token.startswith("for "):
                if current:
                    words.append(current)
                current = []
            else:
                current.append(token)
    return [command for command in words if command[0] not in ("for", "[")]


def test_guide_blocks_are_of_known_kinds() -> None:
    assert {block.info for block in blocks()} == {"bash", "bash run", "yaml"}
    assert len(SHELL) > 20


def test_guide_blocks_say_where_they_run() -> None:
    places = {block.place for block in SHELL if not is_other_way(block)}
    assert places == {*OF_ALL, *OF_CONTROLLER}


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"line{block.line}")
def test_guide_blocks_are_clean_scripts(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "--shell=bash", "--exclude=SC1090,SC1091,SC2002", "-"],
            input=block.text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == ""
    for command in commands(block.text):
        name = command[1] if command[0] == "sudo" else command[0]
        assert name.rsplit("/", 1)[-1] in KNOWN_COMMANDS, command


def called() -> list[list[str]]:
    """Every call of ddp-slurm in the guide, in blocks and in the text."""
    in_blocks = [
        command for block in SHELL for command in commands(block.text) if command[0] == "ddp-slurm"
    ]
    inline = [
        shlex.split(call)
        for call in re.findall(r"`(ddp-slurm [^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.S))
    ]
    return in_blocks + inline


@pytest.mark.parametrize("call", called(), ids=" ".join)
def test_guide_calls_of_ddp_slurm_parse(call: list[str]) -> None:
    words = list(itertools.takewhile(lambda word: not word.startswith(">"), call[1:]))
    _, unknown = make_parser(words).parse_known_args(words)
    assert not unknown


def test_guide_yaml_is_a_cluster(tmp_path: Path) -> None:
    (block,) = [block for block in blocks() if block.info == "yaml"]
    file = tmp_path / "cluster.yaml"
    file.write_text(block.text)
    cluster = Cluster.load(file)
    assert sum(node.gpu_count for node in cluster.nodes) == 7


def test_guide_runnable_blocks_run(tmp_path: Path) -> None:
    (cluster,) = [block for block in blocks() if block.info == "yaml"]
    (tmp_path / "cluster.yaml").write_text(cluster.text)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for block in SHELL:
        if block.info == "bash run":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"line {block.line}: {done.stderr}"
            printed += done.stdout
    assert "7 ranks on 3 nodes" in printed
    slurm_conf = (tmp_path / "slurm/slurm.conf").read_text()
    assert "SlurmctldHost=alpha(192.168.8.151)" in slurm_conf
    assert sorted(path.name for path in (tmp_path / "slurm").iterdir()) == [
        "cgroup.conf",
        "gres.conf",
        "slurm.conf",
    ]


def test_guide_package_blacklist_is_read_by_apt(tmp_path: Path) -> None:
    if shutil.which("apt-config") is None:
        pytest.skip("no apt here")
    (text,) = re.findall(r"<<'END'\n(.*?\n)END\n", TEXT, flags=re.S)
    file = tmp_path / "apt.conf"
    file.write_text(text)
    dump = ["apt-config", "dump", "Unattended-Upgrade::Package-Blacklist"]
    done = subprocess.run(
        dump,
        env={"APT_CONFIG": str(file), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert [
        word for word in ("nvidia-", "libnvidia-", "linux-image-") if f'"{word}"' not in done.stdout
    ] == []


def test_guide_explains_every_step_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (all|controller) \|$", TEXT, flags=re.M)
    assert rows == [
        (step.name, "controller" if step.on_controller_only else "all") for step in STEPS
    ]


def test_guide_usable_releases_are_supported() -> None:
    rows = re.findall(r"^\| (?:Ubuntu|Debian)[^|]*\| (\d\d\.\d\d) \| (\w+)", TEXT, flags=re.M)
    assert len(rows) == 7
    for release, use in rows:
        assert release in RELEASES or use == "no"
    assert {release for release, use in rows if use == "yes"} <= set(RELEASES)


def test_guide_links_exist() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", TEXT, flags=re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (
            target[1:] in anchors if target.startswith("#") else (GUIDE.parent / target).exists()
        ), target
