"""Host lists against Slurm's own reader, and round trips.

What ``scontrol show hostnames`` does with bad lists on 20.11, 22.05, 24.11 and 26.05: its exit
status is always 0; descending ranges, empty brackets, letters in a range and nested brackets print
nothing on stdout and a message on stderr; ``a[1-]`` is read as a1, ``a,,b`` as a and b, and before
24.11 ``a[1-3`` as the host ``a]``. Here all of these are errors: a list with a typing error in it
names other machines than were meant.
"""

import doctest
import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ddp_slurm import hostlist
from ddp_slurm.hostlist import (
    MAX_HOSTS,
    HostlistError,
    compress_hostlist,
    compress_tasks_per_node,
    expand_hostlist,
    expand_tasks_per_node,
)

words = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,5}", fullmatch=True)
literals = st.from_regex(r"[A-Za-z_.-][A-Za-z0-9_.-]{0,3}", fullmatch=True)
numbers = st.builds(
    lambda number, width: str(number).zfill(width), st.integers(0, 1200), st.integers(1, 5)
)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    low = draw(numbers)
    if draw(st.booleans()):
        return low
    high = int(low) + draw(st.integers(0, 12))
    return f"{low}-{str(high).zfill(draw(st.sampled_from([1, len(low)])))}"


brackets = st.lists(ranges(), min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")


@st.composite
def parts(draw: st.DrawFn) -> str:
    """``rack[0-1]_blade[08-10,2]``; no text after the last bracket: that needs Slurm 24.11."""
    text = draw(words)
    for i in range(draw(st.integers(0, 3))):
        text += (draw(literals) if i else "") + draw(brackets)
    return text


hostlists = st.lists(parts(), min_size=1, max_size=4).map(",".join)
hosts = st.lists(
    st.builds(
        lambda word, number, end: word + number + end,
        words,
        numbers | st.just(""),
        st.sampled_from(["", "", "x"]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory):
    """Slurm's reader of host lists; it needs a configuration, but no daemon."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("no scontrol: install slurm-client to compare with Slurm's own reader")
    conf = tmp_path_factory.mktemp("scontrol") / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")

    def show_hostnames(text: str) -> list[str]:
        done = subprocess.run(
            [program, "show", "hostnames", text],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split("\n")[:-1]

    return show_hostnames


against_slurm = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@against_slurm
@given(hostlists)
def test_expansion_is_slurms(scontrol, text):
    assert expand_hostlist(text) == scontrol(text)


@against_slurm
@given(hosts)
def test_slurm_reads_what_is_compressed(scontrol, names):
    assert scontrol(compress_hostlist(names)) == names


@given(hosts)
@example(["a", "a1", "a2"])  # a is not a0
def test_round_trip_keeps_order_and_repetition(names):
    assert expand_hostlist(compress_hostlist(names)) == names


def consecutive(prefix: str, low: int, count: int, width: int) -> list[str]:
    return [f"{prefix}{n:0{width}d}" for n in range(low, low + count)]


@given(
    words.filter(lambda word: not word[-1].isdigit()),
    st.integers(0, 10_000),
    st.integers(2, 50),
    st.integers(1, 6),
)
def test_consecutive_hosts_become_one_range(prefix, low, count, width):
    names = consecutive(prefix, low, count, width)
    assume(len({len(name) for name in names}) == 1 or len(str(low)) >= width)
    text = compress_hostlist(names)
    assert text.count("-") - prefix.count("-") == 1
    assert "," not in text


def test_of_a_longer_number_the_last_18_digits_count():
    names = ["n" + "1" * 18 + last for last in "89"]
    assert compress_hostlist(names) == f"n1[{names[0][2:]}-{names[1][2:]}]"


def test_examples_in_the_docstrings():
    assert doctest.testmod(hostlist).attempted >= 4
    assert doctest.testmod(hostlist).failed == 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[08-10,2],login", ["node08", "node09", "node10", "node2", "login"]),
        ("node10,node9", ["node10", "node9"]),
        ("rack[0-1]_blade[1,0]", ["rack0_blade1", "rack0_blade0", "rack1_blade1", "rack1_blade0"]),
        (
            "a[0-1]b[0-1]c[0-1]",
            ["a0b0c0", "a0b0c1", "a1b0c0", "a1b0c1", "a0b1c0", "a0b1c1", "a1b1c0", "a1b1c1"],
        ),
        ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
        ("[1-2]", ["1", "2"]),
        ("a[1-1]", ["a1"]),
        ("a[01-1]", ["a01"]),
        ("a[99-101]", ["a99", "a100", "a101"]),
        (
            "a[18446744073709551614-18446744073709551615]",
            ["a18446744073709551614", "a18446744073709551615"],  # pragma: allowlist secret
        ),
    ],
)
def test_examples(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "a b",
        "a\n",
        "a[1 -2]",
        "a[]",
        "a[1-]",
        "a[-1]",
        "a[x-y]",
        "a[3-1]",
        "a[010-9]",
        "a[1-3",
        "a1-3]",
        "]a[",
        "a[[1-2]]",
        "a[1,,2]",
        "a[1-2-3]",
        "a[1-2],b[3",
        "a[٣]",
        f"a[0-{MAX_HOSTS}]",
        "a[0-9999]b[0-9999]",
        f"a[{','.join(['0-999999'] * 50)}]",
        "a[0-99999999999999999999]",
        "a[0-800000],b[0-800000]",
    ],
)
def test_bad_lists_are_quoted(text):
    with pytest.raises(HostlistError) as error:
        expand_hostlist(text)
    assert repr(text) in str(error.value)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=30))
def test_task_counts_round_trip(counts):
    assert expand_tasks_per_node(compress_tasks_per_node(counts)) == counts


def test_task_counts():
    assert expand_tasks_per_node("4(x2),2,1(x3)") == [4, 4, 2, 1, 1, 1]
    assert compress_tasks_per_node([4, 4, 2, 1, 1, 1]) == "4(x2),2,1(x3)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4(x",
        "4(x2",
        "4(2)",
        "4(x0)",
        "x2",
        "-1",
        "4,",
        "4 ,2",
        "4(x2)(x3)",
        "1.5",
        "1(x9999999)",
        "٤",
    ],
)
def test_bad_task_counts_are_quoted(text):
    with pytest.raises(HostlistError) as error:
        expand_tasks_per_node(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", [f"a[{'9' * 5000}]", f"a[1-{'9' * 5000}]"])
def test_a_number_too_long_for_int_is_refused(text):
    with pytest.raises(HostlistError):
        expand_hostlist(text)
    with pytest.raises(HostlistError):
        expand_tasks_per_node(text[2:-1])
    with pytest.raises(HostlistError):
        expand_tasks_per_node(f"1(x{'9' * 5000})")


@given(st.text(alphabet="a1[]-,x() 0٣\n", max_size=12))
def test_any_text_is_read_or_refused(text):
    for read in (expand_hostlist, expand_tasks_per_node):
        try:
            read(text)
        except HostlistError as error:
            assert repr(text) in str(error)  # noqa: PT017 : most texts are read
