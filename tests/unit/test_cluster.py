"""cluster.yaml: what is read, and what is refused with which message."""

import re
import shlex
import time
from pathlib import Path

import pytest

from ddp_slurm.cluster import Cluster, ClusterError
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch


def load(tmp_path: Path, text: str | bytes) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Cluster.load(path)


def errors(tmp_path: Path, text: str | bytes) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(str(tmp_path) + "/", "").splitlines()


def test_uneven_machines(uneven: Path) -> None:
    cluster = Cluster.load(uneven)
    assert cluster.name == "lab"
    assert [(n.name, n.gres, n.gpu_count, n.cpus, n.memory_mb) for n in cluster.nodes] == [
        ("gamma", "gpu:titan:1", 1, 8, 30 * 1024),
        ("beta", "gpu:v100:2", 2, 16, 60 * 1024),
        ("alpha", "gpu:a100:4", 4, 32, 240 * 1024),
    ]


def test_every_form_of_gpus_and_names(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
nodes:
  - {name: "gpu[08-10]", gpus: 2}
  - {name: mixed, gpus: [{type: a100, count: 2}, {type: titan}], controller_is_not_here: x}
""".replace(", controller_is_not_here: x", "")
        + "  - {name: login, gpus: 0}\n  - {name: minors, gpus: {count: 2, minors: [0, 3]}}\n",
    )
    assert [n.name for n in cluster.nodes] == [
        "gpu08",
        "gpu09",
        "gpu10",
        "mixed",
        "login",
        "minors",
    ]
    assert [n.gres for n in cluster.nodes[2:]] == ["gpu:2", "gpu:a100:2,gpu:titan:1", "", "gpu:2"]
    assert cluster.nodes[-1].gpus[0].minors == (0, 3)


def test_cards_of_one_type_are_one_gres(tmp_path: Path) -> None:
    """Of two ``gpu:a:N`` Slurm takes the last: ranks would share GPUs."""
    text = "nodes:\n  - {name: a, gpus: [{type: a, count: 2}, {type: b}, {type: a, count: 2}]}\n"
    text += "  - {name: b, gpus: [{count: 2, minors: [4, 1]}, {minors: [0]}]}\n"
    assert [n.gres for n in load(tmp_path, text).nodes] == ["gpu:a:4,gpu:b:1", "gpu:3"]
    assert load(tmp_path, text).nodes[1].gpus[0].minors == (4, 1, 0)


@pytest.mark.parametrize(
    "text", ["0123", "1_000", "no", "yes", "12e3", "null", "0x1f", "1.10", "22-05"]
)
def test_unquoted_scalars_keep_their_text(tmp_path: Path, text: str) -> None:
    cluster = load(
        tmp_path,
        f"name: {text}\nnodes:\n  - name: {text if '_' not in text else 'n'}\n"
        f"    gpus: {{type: {text}, count: 1}}\n"
        f"    partition: {text}\n    env: {{A: {text}}}\n",
    )
    node = cluster.nodes[0]
    assert (cluster.name, node.gpus[0].type, node.partition, dict(node.env)) == (
        text,
        text,
        text,
        {"A": text},
    )


def test_ssh_of_the_cluster_is_the_default_of_its_nodes(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        "ssh: {user: ann, port: 2222}\nnodes:\n"
        "  - {name: a, gpus: 1}\n  - {name: b, gpus: 1, ssh: {port: 22}}\n",
    )
    assert [(n.ssh.user, n.ssh.port) for n in cluster.nodes] == [("ann", 2222), ("ann", 22)]


NODE = "nodes:\n  - name: a\n    gpus: 1\n"

BAD = {
    "misspelt key": (
        NODE + "    cpsu: 8\n",
        "cluster.yaml:4: nodes[0].cpsu: unknown key; did you mean 'cpus'?",
    ),
    "misspelt key below": (
        "nodes:\n  - name: a\n    gpus: {typ: x, count: 1}\n",
        "cluster.yaml:3: nodes[0].gpus[0].typ: unknown key; did you mean 'type'?",
    ),
    "unknown key": ("colour: red\n" + NODE, "cluster.yaml:1: colour: unknown key"),
    "a node twice": (
        NODE + "  - {name: a, gpus: 2}\n",
        "cluster.yaml:4: nodes[1].name: duplicate node 'a', first on line 2",
    ),
    "a node twice in a list": (
        NODE.replace("a\n", '"n[1-3],n2"\n', 1),
        "duplicate node 'n2', first on line 2",
    ),
    "a key twice": (
        NODE + "    gpus: 2\n",
        "cluster.yaml:4: nodes[0].gpus: duplicate key 'gpus', first on line 3",
    ),
    "no GPU anywhere": (NODE.replace("1", "0"), "cluster.yaml:1: nodes: no node has a GPU"),
    "no node": ("nodes: []\n", "cluster.yaml:1: nodes: no node has a GPU"),
    "no nodes": ("name: x\n", "cluster.yaml:1: nodes: missing"),
    "type with a space": (
        "nodes:\n  - name: a\n    gpus: {type: a 100, count: 1}\n",
        "cluster.yaml:3: nodes[0].gpus[0].type: 'a 100' is not a gres type",
    ),
    "type with a command": (
        'nodes:\n  - {name: a, gpus: {type: "$(id)"}}\n',
        "'$(id)' is not a gres type",
    ),
    "type with a newline": (
        'nodes:\n  - {name: a, gpus: {type: "a\\nb"}}\n',
        "'a\\nb' is not a gres type",
    ),
    "name with a newline": ('nodes:\n  - {name: "a\\nb", gpus: 1}\n', "'a\\nb' has a newline"),
    "name with a command": ('nodes:\n  - {name: "$(id)", gpus: 1}\n', "'$(id)' is not a host name"),
    "host list": (
        'nodes:\n  - {name: "a[1-", gpus: 1}\n',
        "host list 'a[1-' has a bracket that is not closed",
    ),
    "memory 64Gi": (
        NODE + "    memory: 64Gi\n",
        "cluster.yaml:4: nodes[0].memory: '64Gi' is not a memory size",
    ),
    "memory 2.5G": (NODE + "    memory: 2.5G\n", "'2.5G' is not a memory size"),
    "memory 64GB": (NODE + "    memory: 64GB\n", "'64GB' is not a memory size"),
    "memory 64": (
        NODE + "    memory: 64\n",
        "'64' is not a memory size: Slurm reads it as MiB; write 64M or 64G",
    ),
    "memory 0": (NODE + "    memory: 0\n", "'0' is not a memory size"),
    "cpus in words": (
        NODE + "    cpus: many\n",
        "cluster.yaml:4: nodes[0].cpus: 'many' is not a whole number",
    ),
    "cpus 1_0": (NODE + "    cpus: 1_0\n", "'1_0' is not a whole number"),
    "minors": (
        "nodes:\n  - {name: a, gpus: {count: 2, minors: [1, 1]}}\n",
        "[1, 1] are not 2 different numbers",
    ),
    "minors of some": (
        "nodes:\n  - {name: a, gpus: [{type: x, minors: [1]}, {type: x, count: 2}]}\n",
        "cluster.yaml:2: nodes[0].gpus: type x: minors [1] are not 3 different numbers",
    ),
    "types of some": (
        "nodes:\n  - {name: a, gpus: [{type: x}, {count: 2}]}\n",
        "give all GPUs of the node a type, or none",
    ),
    "gpus without keys": (
        "nodes:\n  - {name: a, gpus: {}}\n",
        "nodes[0].gpus: a mapping without keys; write {type: TYPE",
    ),
    "gpus in Slurm's words": (
        NODE.replace("1", "a100:4"),
        "'a100:4' is Slurm's syntax; write {type: a100, count: 4}",
    ),
    "too many gpus": (
        NODE.replace("1", "999999999"),
        "nodes[0].gpus: 999999999 GPUs are more than a machine has",
    ),
    "nodes in one word": (
        "nodes: gpu[01-04]\n",
        "expected a list of machines, got 'gpu[01-04]'; write each as '- name: NAME'",
    ),
    "merge keys": (
        "nodes:\n  - &a {name: a, gpus: 1}\n  - {<<: *a, name: b}\n",
        "cluster.yaml:3: merge keys (<<) are not supported",
    ),
    "env of a rank": (
        NODE + "    env: {RANK: 1}\n",
        "nodes[0].env.RANK: 'RANK' differs from rank to rank",
    ),
    "env with a newline": (
        NODE + '    env: {A: "x\\ny"}\n',
        "nodes[0].env.A: 'x\\ny' has a newline",
    ),
    "env with a command": (
        NODE + "    env: {A: $(id)}\n",
        "nodes[0].env.A: '$(id)' has a command substitution",
    ),
    "lo among several": (
        NODE + "    interface: lo\n  - {name: b, gpus: 1}\n",
        "cluster.yaml:4: nodes[0].interface: 'lo' does not reach other nodes",
    ),
    "controller": (
        "controller: c\n" + NODE,
        "cluster.yaml:1: controller: 'c' is not one of the nodes",
    ),
    "one address for many": (
        'nodes:\n  - {name: "n[1-2]", gpus: 1, address: 10.0.0.1}\n',
        "cannot be the address of 2 nodes",
    ),
    "a list": ("- a\n- b\n", "cluster.yaml:1: expected keys such as 'name:', got a list"),
    "empty": (
        "# nothing yet\n",
        "cluster.yaml: the file is empty; expected YAML with keys",
    ),
    "no key": ('"": x\n' + NODE, "cluster.yaml:1: '': unknown key"),
    "nested": ("[" * 900 + "]" * 900, "cluster.yaml: its lists and mappings are nested too deeply"),
    "port": (
        NODE + "    ssh: {port: 65536}\n",
        "cluster.yaml:4: nodes[0].ssh.port: 65536 is not a port; the highest is 65535",
    ),
    "a word": ("hello\n", "cluster.yaml:1: expected keys such as 'name:', got 'hello'"),
    "binary": (b"\x00\xff\xfe\x80", "cluster.yaml: not a text file"),
    "control characters": (b"name: \x07\n", "cluster.yaml: not valid YAML"),
    "not YAML": ("nodes: [\n", "cluster.yaml:2: not valid YAML"),
    "alias in itself": ("nodes: &a [*a]\n", "an alias that contains itself"),
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{c}: &{c} [{','.join(['*' + p] * 10)}]\n"
            for p, c in zip("abcdefg", "bcdefgh", strict=True)
        ),
        "too many values",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    text, expected = BAD[case]
    found = errors(tmp_path, text)
    assert any(expected in line for line in found), found
    assert len(found) <= 2, found


def test_all_errors_are_reported_in_the_order_of_lines(tmp_path: Path) -> None:
    found = errors(
        tmp_path,
        "nmae: x\nnodes:\n  - name: a\n    gpus: {type: a b}\n    memory: 1Gi\n    cpus: x\n",
    )
    assert [line.split(": ")[0:2] for line in found] == [
        ["cluster.yaml:1", "nmae"],
        ["cluster.yaml:4", "nodes[0].gpus[0].type"],
        ["cluster.yaml:5", "nodes[0].memory"],
        ["cluster.yaml:6", "nodes[0].cpus"],
    ]


@pytest.mark.parametrize(
    "entry",
    [
        "  - {name: n, gpus: 1, cpus: many}\n",
        "  - {name: n, gpus: 1, cp%d: 8}\n",
        "  - {name: n, gpus: 1, env: {A B%d: x}}\n",
        "  - {name: dup, gpus: 1}\n",
    ],
)
def test_of_many_errors_the_first_are_shown_and_counted(tmp_path: Path, entry: str) -> None:
    count = 2_000
    found = errors(
        tmp_path, "nodes:\n" + "".join(entry.replace("%d", str(n)) for n in range(count))
    )
    assert len(found) == 51
    assert sum(len(line) for line in found) < 20_000
    assert found[0].startswith(("cluster.yaml:2: nodes[0]", "cluster.yaml:3: nodes[1]"))
    expected = count - 50 - ("dup" in entry)
    assert found[-1] == f"cluster.yaml: {expected} more errors"


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, NODE + f"    cpus: {'x' * 1_000_000}\n")
    assert len(found) < 1000
    assert "xxx... (1000002 characters) is not a whole number" in found
    (found,) = errors(tmp_path, NODE + f'    ? "{"k" * 1000}\\e[31m"\n    : 8\n')
    assert len(found) < 1000
    assert "\x1b" not in found


def test_host_lists_together_have_one_limit(tmp_path: Path) -> None:
    items = "".join(f"  - {{name: 'n{i}x[0-999999]', gpus: 1}}\n" for i in range(50))
    started = time.monotonic()
    found = errors(tmp_path, f"nodes:\n{items}")
    assert "nodes[2]: not read: the items before it name more than 1000000 hosts" in found[0]
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "text", ["GPU_MEM:80GB", "GPU_MEM:80GB&a=b", "[x/y|p%q]*2", "{GPU:a|GPU:b}", "!old,new~1"]
)
def test_features_as_slurm_takes_them(tmp_path: Path, text: str) -> None:
    cluster = load(tmp_path, NODE + f"    constraint: '{text}'\n    features: [GPU:80GB, a=b]\n")
    assert cluster.nodes[0].constraint == text
    assert cluster.nodes[0].features == ("GPU:80GB", "a=b")
    script = render_sbatch(make_plan(cluster, JobOptions.read({"command": ["x"]})))
    (directive,) = re.findall("#SBATCH --constraint=(.*)", script)
    assert shlex.split(directive) == [text]


@pytest.mark.parametrize("text", ["a b", "$(id)", "a`id`", 'a"b', "a'b", "a\\b", "a$b", ""])
def test_a_constraint_that_could_be_more_than_one_word(tmp_path: Path, text: str) -> None:
    quoted = text.replace("'", "''")
    found = errors(tmp_path, NODE + f"    constraint: '{quoted}'\n")
    assert "a constraint in Slurm's syntax" in found[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere\.yaml: no such file"):
        Cluster.load(tmp_path / "nowhere.yaml")
