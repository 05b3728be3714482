"""Several processes as one: what the tests of the backends do not reach."""

import os
import sys
from types import SimpleNamespace

import pytest

from ddp_slurm.backends import processes
from ddp_slurm.backends.processes import Ending, Process, run_all


def test_a_lifeline_gives_its_text_and_a_heartbeat(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", 0.01)
    reads = 'IFS= read -r line; echo "got $line"; head -c 3; echo; exec sleep 0.2 <&-'
    process = Process(
        ["sh", "-c", reads], os.environ, label="[a] ", name="reader", lifeline="a line"
    )
    assert run_all([process], "node") == Ending(0, interrupted=False)
    assert capfd.readouterr().out == "[a] got a line\n[a] ...\n"


def test_a_full_disk_does_not_stop_the_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        process = Process(["seq", "30000"], os.environ, label="", name="talks")
        assert run_all([process], "rank") == Ending(0, interrupted=False)
