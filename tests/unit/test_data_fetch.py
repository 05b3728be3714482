"""``--dataset``: each node fetches once, the nodes help each other, and what goes wrong."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from ddp_slurm.data import cache as cache_module
from ddp_slurm.data import fetch, swarm
from ddp_slurm.data.cache import Cache
from ddp_slurm.data.client import Client
from ddp_slurm.data.errors import DataSetError
from ddp_slurm.data.swarm import Member
from ddp_slurm.data.tracker import Report
from ddp_slurm.data.web import application
from ddp_slurm.job.checks import combination_errors
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job_env import REQUEUE_MARKER
from ddp_slurm.schema.schema import Invalid
from ddp_slurm.trust import TrustError
from tests.data_sets import TOKEN, WRONG_TOKEN, DataServer, contents, make_data_set
from tests.processes import catches
from tests.waiting import wait_until

from .conftest import Command

ALONE = Member(job="job", node="0", nodes=1, seeds=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataServer]:
    folder = tmp_path_factory.mktemp("served") / "set"
    make_data_set(folder)
    with DataServer(folder) as server:
        yield server


def start_rank(
    server: DataServer, cache: Path, rank: int, nodes: int, token: str = TOKEN, **variables: str
) -> "subprocess.Popen[str]":
    """A rank of a job with two ranks a node, whose command prints its data set's folder."""
    place = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 2 * nodes, "LOCAL_WORLD_SIZE": 2}
    place |= {"GROUP_RANK": rank // 2, "MASTER_PORT": 29500}
    environ = {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "DDP_SLURM_TOKEN": "ab" * 16,
        "DDP_SLURM_TASKS_PER_NODE": f"2(x{nodes})",
        "DDP_SLURM_DATA_TOKEN": token,
        **variables,
    }
    words = [server.url, "--cache", str(cache), "--", "sh", "-c", 'echo "in $DDP_SLURM_DATA"']
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_slurm.data.node", *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs_of(ranks: "list[subprocess.Popen[str]]") -> list[str]:
    outputs = []
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        outputs.append(out + err)
    return outputs


def obtain(server: DataServer, folder: Path, member: Member = ALONE) -> Path:
    return asyncio.run(fetch.obtain(server.url, TOKEN, Cache(folder), member))


def test_each_node_fetches_once_and_the_server_sends_once(
    served: DataServer, tmp_path: Path
) -> None:
    nodes = 3
    ranks = [
        start_rank(served, tmp_path / str(rank // 2), rank, nodes) for rank in range(2 * nodes)
    ]
    text = "".join(outputs_of(ranks))
    folders = set(re.findall("in (.+)", text))
    assert len(folders) == nodes
    for folder in folders:
        assert contents(Path(folder)) == contents(served.folder)
    fetched = re.findall("complete after .*, ([0-9,]+) bytes, ([0-9,]+) of them from", text)
    totals, sent = zip(*([int(n.replace(",", "")) for n in line] for line in fetched), strict=True)
    assert len(totals) == nodes
    assert sum(sent) == totals[0]


def test_server_killed_midway_and_started_again(tmp_path: Path) -> None:
    make_data_set(tmp_path / "set", kilobytes=40_000)
    partial = tmp_path / "cache"

    def has_begun() -> bool:
        files = partial.glob(".*.part/train/large.bin")
        return any(file.stat().st_blocks > 8000 for file in files)

    with DataServer(tmp_path / "set") as server:
        rank = start_rank(server, tmp_path / "cache", 0, 1)
        wait_until(has_begun, "the first pieces", seconds=30)
        server.kill()
        assert not list(partial.glob("[0-9a-f]*"))
        time.sleep(1)
        assert rank.poll() is None
        server.start()
        (output,) = outputs_of([rank])
    folder = Path(re.findall("in (.+)", output)[0])
    assert contents(folder) == contents(tmp_path / "set")


@pytest.mark.parametrize("may_be_requeued", [True, False])
def test_stop_signal_during_a_fetch(tmp_path: Path, may_be_requeued: bool) -> None:
    make_data_set(tmp_path / "set")
    with DataServer(tmp_path / "set") as server:
        server.process.send_signal(signal.SIGSTOP)  # the fetch lasts
        marker = tmp_path / "requeue"
        variables = {REQUEUE_MARKER: str(marker)} if may_be_requeued else {}
        # The second one waits for the lock of the first.
        ranks = [start_rank(server, tmp_path / "cache", rank, 1, **variables) for rank in (0, 1)]
        wait_until(
            lambda: all(catches(signal.SIGUSR2, rank.pid) for rank in ranks), "both", seconds=60
        )
        for rank in ranks:
            rank.send_signal(signal.SIGUSR2)
        errors = [rank.communicate(timeout=30)[1] for rank in ranks]
        server.process.send_signal(signal.SIGCONT)
    assert [rank.returncode for rank in ranks] == ([0, 0] if may_be_requeued else [140, 140])
    if may_be_requeued:
        assert marker.read_text() == "during the fetch of its data set"
    for error in errors:
        assert "stopped during the fetch; what has arrived is kept" in error
        assert "Traceback" not in error


def test_an_interrupted_fetch_goes_on(served: DataServer, tmp_path: Path) -> None:
    folder = obtain(served, tmp_path)
    partial = tmp_path / f".{folder.name}.part"
    folder.rename(partial)
    (partial / ".ddp-slurm-manifest.json").unlink()
    with (partial / "train/large.bin").open("r+b") as file:
        file.write(b"not yet")
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch, "say", messages.append)
        assert obtain(served, tmp_path) == folder
    assert contents(folder) == contents(served.folder)
    sent = int(re.findall("([0-9,]+) of them", messages[0])[0].replace(",", ""))
    assert sent == 2**18  # one piece


def test_a_changed_byte_of_a_copy_is_found_and_repaired(
    served: DataServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = obtain(served, tmp_path)
    capsys.readouterr()
    assert obtain(served, tmp_path) == folder
    assert "complete after" not in capsys.readouterr().err  # a complete copy is not fetched
    with (folder / "train/large.bin").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"flipped")
    (folder / "small/7").unlink()
    assert obtain(served, tmp_path) == folder
    assert contents(folder) == contents(served.folder)


def test_a_flipped_byte_on_the_server_is_found(tmp_path: Path) -> None:
    make_data_set(tmp_path / "set", kilobytes=600)
    path = tmp_path / "set/train/large.bin"
    with DataServer(tmp_path / "set") as server:
        before = path.stat()
        with path.open("r+b") as file:
            for offset in (10, 300_000, 600_000):
                file.seek(offset)
                file.write(b"flipped")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a bad disk would do it
        with pytest.raises(DataSetError, match="do not match its checksums"):
            obtain(server, tmp_path / "cache")


class BadPeer(threading.Thread):
    """A node that reports to have all pieces, and sends wrong ones."""

    def __init__(self, server: DataServer) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.asked = 0
        self.reported = threading.Event()
        self.ends = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async def send(request: web.Request) -> web.Response:
            self.asked += 1
            return web.Response(body=b"wrong")

        app = application(TOKEN)
        app.add_routes([web.get("/pieces/{piece}", send)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = Client(self.server.url, TOKEN)
        manifest = await client.manifest(None)
        assert manifest is not None
        have = (1 << len(manifest.pieces)) - 1
        while not self.ends.is_set():
            await client.report(Report("bad0bad0", "other", "0", url, have, ready=False))
            self.reported.set()
            await asyncio.sleep(0.2)
        await client.report(Report("bad0bad0", "other", "0", None, 0, ready=False))
        await client.close()
        await runner.cleanup()


def test_a_node_that_sends_wrong_bytes_is_not_believed(
    served: DataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(swarm, "STALL_SECONDS", 0.3)
    peer = BadPeer(served)
    peer.start()
    assert peer.reported.wait(20)
    folder = obtain(served, tmp_path)
    peer.ends.set()
    peer.join(20)
    assert contents(folder) == contents(served.folder)
    assert peer.asked == 1
    assert "is wrong; that node is not asked again" in capsys.readouterr().err


def test_a_wrong_token_ends_the_rank_with_its_reason(served: DataServer, tmp_path: Path) -> None:
    rank = start_rank(served, tmp_path, 3, 2, token=WRONG_TOKEN)
    out, err = rank.communicate(timeout=60)
    assert rank.returncode == 2
    assert out == ""
    assert re.match(
        f"error: rank 3 on .*: data set {served.url}: the server refuses the token", err
    )
    assert WRONG_TOKEN not in err


def test_without_a_server_the_copy_of_an_earlier_job_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "FIRST_ANSWER_SECONDS", 0.0)
    make_data_set(tmp_path / "set", kilobytes=10)
    with DataServer(tmp_path / "set") as server:
        folder = obtain(server, tmp_path / "cache")
    assert obtain(server, tmp_path / "cache") == folder
    assert "does not respond; this node uses its copy" in capsys.readouterr().err
    with pytest.raises(DataSetError, match="the server does not respond: "):
        obtain(server, tmp_path / "other cache")
    (folder / "empty").write_text("changed")
    with pytest.raises(DataSetError, match="files of the copy on this node were changed"):
        obtain(server, tmp_path / "cache")


def test_other_nodes_that_do_not_come_are_not_waited_for_ever(
    served: DataServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(swarm, "LINGER_SECONDS", 2.0)
    obtain(served, tmp_path, Member(job="short", node="0", nodes=2, seeds=True))
    assert "note: 1 of 2 nodes have the data set" in capsys.readouterr().err


def test_a_full_disk_is_named_before_the_fetch(
    served: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataSetError, match="the disk has 1,000 bytes free"):
        obtain(served, tmp_path)


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(TrustError, match="is a link, which is not followed here"):
        Cache(tmp_path / "link")


def test_local_ranks_find_the_data_set(
    served: DataServer, uneven: Path, submit: Command, tmp_path: Path
) -> None:
    script = "import os; print(os.listdir(os.environ['DDP_SLURM_DATA']))"
    (tmp_path / "script.py").write_text(script)
    options = ["--gpus", "3", "--dataset", served.url, "--dataset-cache", str(tmp_path / "cache")]
    done = submit(
        "--backend", "local", *options, "--", "script.py", env={"DDP_SLURM_DATA_TOKEN": TOKEN}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'page.html'") == 3
    assert done.stdout.count("complete after") + done.stderr.count("complete after") == 1


def test_the_fetching_command_is_before_the_users() -> None:
    options = JobOptions(command="python train.py 5", dataset="http://a:1", python="/p")
    node = ("/p", "-m", "ddp_slurm.data.node", "http://a:1")
    assert options.task_command == (*node, "--", "/p", "train.py", "5")
    with_cache = options.replaced(dataset_cache="/scratch/x")
    assert with_cache.task_command[:6] == (*node, "--cache", "/scratch/x")
    assert JobOptions(dataset="http://a:1").task_command == ()


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://u:p@a", "http://a:x", "http://a?token=1"]
)
def test_dataset_refuses_what_is_no_server(url: str) -> None:
    with pytest.raises(Invalid):
        JobOptions(dataset=url)


def test_a_cache_without_a_data_set_is_refused() -> None:
    (error,) = combination_errors(JobOptions(dataset_cache="/x"))
    assert "--dataset-cache needs --dataset" in error
