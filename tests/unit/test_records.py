"""Slurm's records: gres, node states, limits of partitions, and text that looks like a key."""

from pathlib import Path

import pytest

from ddp_slurm.slurm_client.records import (
    read_gres,
    read_minutes,
    read_nodes,
    read_partitions,
    read_records,
    state_words,
    unavailable_words,
)

RECORDED = Path(__file__).parent / "scontrol"
RELEASES = ("20.11", "22.05", "24.11", "26.05")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("gpu:4", 4),
        ("gpu:a100:2(S:0-1),gpu:titan:1", 3),
        ("(null)", 0),
        ("", 0),
        ("nic:2,gpu:v100:1", 1),
        ("gpu:rtx_3090:2(IDX:0-1)", 2),
        ("gpu:a:b:2", 2),
        ("gpu:a100:4(S:0,2),mps:400(S:0)", 4),
        ("gpu", 1),
        ("gpu:no_consume:3", 3),
        ("shard:gpu:8", 0),
    ],
)
def test_gres_counts_gpus(text: str, count: int) -> None:
    assert sum(gres.number for gres in read_gres(text) if gres.name == "gpu") == count


def test_state_words_are_whole_words_and_signs() -> None:
    assert state_words("IDLE*+DRAIN") == {"IDLE", "NOT_RESPONDING", "DRAIN"}
    assert state_words("MIXED-") == {"MIXED", "PLANNED"}
    assert state_words("IDLE+CLOUD+POWERED_DOWN") == {"IDLE", "CLOUD", "POWERED_DOWN"}
    assert state_words("DOWN$~") == {"DOWN", "MAINTENANCE", "POWERED_DOWN"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("IDLE+POWERED_DOWN", set()),
        ("IDLE+CLOUD+NOT_RESPONDING+POWERING_UP", set()),
        ("IDLE+NOT_RESPONDING", {"NOT_RESPONDING"}),
        ("DOWN+CLOUD+NOT_RESPONDING+POWERED_DOWN", {"DOWN"}),
        ("IDLE+MAINTENANCE+RESERVED", {"MAINTENANCE"}),
        ("ALLOCATED+REBOOT_REQUESTED", set()),
    ],
)
def test_power_saving_is_no_error(state: str, words: set[str]) -> None:
    assert unavailable_words(state) == words


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("file", ["node.txt", "node_lines.txt"])
def test_nodes_of_both_forms(release: str, file: str) -> None:
    """node.txt is recorded with ``-o``, node_lines.txt without."""
    for node in read_nodes((RECORDED / release / file).read_text()):
        assert node.version is not None
        assert node.version.startswith(release)
        assert node.cpus
        assert node.real_memory_mb
        assert node.reserved_memory_mb == 0
        assert " " not in node.state


def test_reason_and_who_set_it() -> None:
    one_line = "NodeName=n1 State=DOWN Reason=fan [1] is [x@y] off [root@2026-11-28T00:19:26]"
    (node,) = read_nodes(one_line)
    assert (node.reason, node.reason_by) == ("fan [1] is [x@y] off", "root")
    (node,) = read_nodes("NodeName=n1 State=DOWN Reason=Not responding")
    assert (node.reason, node.reason_by) == ("Not responding", "")


@pytest.mark.parametrize("release", RELEASES)
def test_partitions_recorded_with_a_blank_in_a_name(release: str) -> None:
    everything, limited = read_partitions((RECORDED / release / "partition_lines.txt").read_text())
    assert (everything.name, everything.is_default) == ("all", True)
    assert (everything.max_nodes, everything.max_minutes) == (None, None)
    assert everything.allowed_accounts == everything.allowed_groups == ()
    assert (limited.name, limited.max_nodes, limited.max_minutes) == ("big mem", 1, 60)
    assert limited.allowed_accounts == ("phys",)
    assert limited.allowed_groups == ("adm", "sudo")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("1-02:00:00", 1560), ("00:30:00", 30), ("00:00:01", 1), ("UNLIMITED", None), ("x", None)],
)
def test_time_limits_in_minutes(text: str, minutes: int | None) -> None:
    assert read_minutes(text) == minutes


def test_records_ignore_what_is_no_record() -> None:
    text = "warning: old\nJobId=1 JobName=x\n   JobState=RUNNING Reason=None\n     JobState=BAD\n"
    assert read_records(text, "JobId") == [
        {"JobId": "1", "JobName": "x", "JobState": "RUNNING", "Reason": "None"}
    ]
    assert read_records("No jobs in the system\n", "JobId") == []


def test_line_break_in_a_text_adds_no_value() -> None:
    (node,) = read_nodes("NodeName=n1 CPUTot=8\n   State=IDLE\n   Comment=a\n   State=DOWN\n")
    assert node.state == "IDLE"


def test_values_that_slurm_does_not_have_are_left_out() -> None:
    text = "NodeName=a Arch=(null)\n   Version=N/A Owner=N/A State=IDLE\n"
    (record,) = read_records(text, "NodeName")
    assert record == {"NodeName": "a", "State": "IDLE"}
