"""Roots of other Slurm releases: made once, whole or not at all, else with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.lab import Lab, LabError, LabNode, daemons, lab, registry, releases
from ddp_slurm.lab.layout import LabLayout
from ddp_slurm.lab.releases import ReleaseNotAvailable, slurm_root

MAKES_A_ROOT = """\
for target; do
    case $target in *.unfinished) mkdir -p "$target/etc" ;; esac
done
echo made >>"$0.calls"
"""


@pytest.fixture
def folder(
    tmp_path: Path, stub: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The cache; this machine has 22.05, and a finished root says 24.11.5."""
    monkeypatch.setenv("DDP_SLURM_RELEASES", str(tmp_path / "cache"))
    monkeypatch.setattr(releases.os, "geteuid", lambda: 0)
    stub("slurmd", "echo slurm-wlm 22.05.8")
    stub("chroot", "echo slurm-wlm 24.11.5")
    stub("unshare", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    return tmp_path / "cache"


def test_own_release_needs_no_root_folder(folder: Path, stub: Callable[[str, str], Path]) -> None:
    stub("debootstrap", "exit 9")
    assert slurm_root("22.05") is None
    assert not folder.exists()


def test_root_is_made_once(folder: Path, stub: Callable[[str, str], Path]) -> None:
    debootstrap = stub("debootstrap", MAKES_A_ROOT)
    assert slurm_root("24.11") == slurm_root("24.11") == folder / "24.11"
    assert (folder / "24.11" / "etc" / "hosts").exists()
    assert Path(f"{debootstrap}.calls").read_text() == "made\n"


def test_failed_debootstrap_is_reported_and_leaves_no_root(
    folder: Path, stub: Callable[[str, str], Path]
) -> None:
    stub("debootstrap", f"{MAKES_A_ROOT}\necho 'E: Failed getting release file'; exit 1")
    with pytest.raises(
        ReleaseNotAvailable, match="debootstrap of Debian 13: E: Failed getting release file"
    ):
        slurm_root("24.11")
    assert not (folder / "24.11").exists(), "half a root is not taken for one"


def test_suite_with_a_newer_release_is_refused(
    folder: Path, stub: Callable[[str, str], Path]
) -> None:
    stub("debootstrap", MAKES_A_ROOT)
    with pytest.raises(ReleaseNotAvailable, match=r"Debian testing has Slurm 24\.11 now"):
        slurm_root("26.05")


def test_release_that_no_debian_has_is_refused(folder: Path) -> None:
    with pytest.raises(
        ReleaseNotAvailable, match=r"Slurm '23\.11'; known are 20\.11, 22\.05, 24\.11, 26\.05"
    ):
        slurm_root("23.11")


def test_making_a_root_needs_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases.os, "geteuid", lambda: 1000)
    with pytest.raises(ReleaseNotAvailable, match="this is not root"):
        slurm_root("24.11")


def test_node_called_localhost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "check_machine", lambda slurm_root: None)
    monkeypatch.setattr(registry, "reserve", {}.__getitem__)  # nothing is made
    with pytest.raises(LabError, match="a node of a lab cannot be called 'localhost'"):
        Lab.up(Cluster("x", (Node("localhost"),)))


def test_start_waits_for_a_slurmctld_that_does_not_respond_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = LabNode("a", 1, "198.18.0.1", "ddplab.x.a")
    answers = iter([Answer(1, "", "Zero Bytes were transmitted"), Answer(0, IDLE_NODE, "")])
    monkeypatch.setattr(LabLayout, "ask", lambda *arguments: next(answers))
    monkeypatch.setattr(daemons, "is_running", lambda *arguments: True)
    daemons.wait_for_nodes(LabLayout("x", 0, "controller", (node,)))
    assert list(answers) == []


IDLE_NODE = "NodeName=a Arch=x86_64 State=IDLE ThreadsPerCore=1\n"
