"""cluster.yaml as it is written: it reads back as the same cluster."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm.cluster import Cluster, GpuModel, Node, Ssh
from ddp_slurm.cluster.write import cluster_yaml

WORDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,8}", fullmatch=True) | st.sampled_from(
    ["no", "yes", "null", "0123", "1_0", "1e3", "0x1f", "on"]
)
TEXTS = st.text(
    st.characters(categories=["L", "N", "P", "S", "Zs"], exclude_characters="`"), max_size=9
).filter(lambda text: not re.search(r"\$(\(|\{?(A|NO|b_1))", text))
TYPES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
NUMBERS = st.none() | st.integers(1, 300)
GPUS = st.builds(
    GpuModel, type=st.none() | TYPES, count=st.integers(1, 9), minors=st.none()
) | st.just(GpuModel(count=2, minors=(3, 1)))


def each_has_a_type_of_its_own(gpus: tuple[GpuModel, ...]) -> bool:
    types = {model.type for model in gpus}
    return len(types) == len(gpus) and (len(gpus) < 2 or None not in types)


NODES = st.builds(
    Node,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9-]{0,3}[0-9]{1,3}", fullmatch=True),
    gpus=st.lists(GPUS, max_size=2).map(tuple).filter(each_has_a_type_of_its_own),
    cpus=NUMBERS,
    memory_mb=st.none() | st.integers(1, 10**7),
    address=st.none() | st.sampled_from(["198.18.0.7", "fd00::5", "node.lab"]),
    interface=st.none() | st.sampled_from(["eno1", "enp3s0f1.7"]),
    partition=st.none() | WORDS,
    constraint=st.none() | st.sampled_from(["volta&nvlink", "[a|b]", "(x,y)*2", "!z"]),
    env=st.dictionaries(st.sampled_from(["A", "NO", "b_1"]), TEXTS).map(
        lambda env: tuple(env.items())
    ),
    ssh=st.builds(
        Ssh,
        user=st.none() | st.just("ann"),
        port=st.none() | st.just(2222),
        identity=st.none() | st.just("~/my: key"),
    ),
    sockets=NUMBERS,
    cores_per_socket=NUMBERS,
    threads_per_core=NUMBERS,
    features=st.lists(WORDS, max_size=2).map(tuple),
    os=st.none() | st.sampled_from(["ubuntu-22.04", "debian-12"]),
)


@given(
    name=WORDS,
    nodes=st.lists(NODES, min_size=1, max_size=6, unique_by=lambda node: node.name).filter(
        lambda nodes: any(node.gpus for node in nodes)
    ),
    has_controller=st.booleans(),
)
def test_it_reads_back_as_the_same_cluster(
    tmp_path_factory: pytest.TempPathFactory, name: str, nodes: list[Node], has_controller: bool
) -> None:
    cluster = Cluster(name, tuple(nodes), nodes[-1].name if has_controller else None)
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(cluster_yaml(cluster))
    assert Cluster.load(file) == cluster


def test_equal_nodes_share_an_item_unless_each_has_an_address() -> None:
    nodes = tuple(Node(f"gpu{n:02}", (GpuModel(count=1),), 4) for n in range(1, 5))
    assert "  - name: 'gpu[01-04]'\n" in cluster_yaml(Cluster("lab", nodes))
    there = tuple(node._replace(address="10.0.0.1") for node in nodes)
    assert cluster_yaml(Cluster("lab", there)).count("- name:") == 4


def test_comments_stand_behind_what_they_are_about() -> None:
    nodes = (Node("a", (GpuModel(type="titan"),), 4), Node("b", (GpuModel(type="titan"),), 4))
    assert cluster_yaml(
        Cluster("lab", nodes), ["top"], {"b": {"name": "new", "gpus": "12 GB", "memory": "?"}}
    ) == (
        "# top\nname: lab\nnodes:\n"
        "  - name: a\n    gpus: {type: titan, count: 1}\n    cpus: 4\n"
        "  - name: b  # new\n    gpus: {type: titan, count: 1}  # 12 GB\n    cpus: 4\n"
    )
