"""Files of an attempt on their way home."""

import gzip
import os
from pathlib import Path

import pytest

from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.gang import environment as attempt_files
from cluster.gang.environment import MAX_BYTES_PER_RANK, PIECE_BYTES, FilePiece, FileReceiver, HomeMark, pieces
from cluster.gang.messages import RankSlot
from tests.cluster.gangs import PRELOAD, run
from trials.outcome import Measured
from trials.reports import FOLDER

SLOTS = (RankSlot(rank=0, local_rank=0, index=0), RankSlot(rank=12, local_rank=1, index=1))


def sent(directory):
    return list(pieces(directory, "a1", "token", SLOTS))


def home_after(tmp_path, messages):
    receiver = FileReceiver(tmp_path / "home")
    for message in messages:
        receiver.take(message)
    folder = tmp_path / "home/a1" / FOLDER
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "away" / FOLDER
    made.mkdir(parents=True)
    return made


def test_files_arrive_unchanged_in_pieces_and_readable_by_the_owner_only(tmp_path, folder):
    files = {"rank0.trace.json.gz": os.urandom(2 * PIECE_BYTES + 7), "rank12.graph-0-0.forward.txt": b""}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    messages = sent(folder.parent)
    assert [message.offset for message in messages] == [0, PIECE_BYTES, 2 * PIECE_BYTES, 0]
    assert home_after(tmp_path, messages) == files
    assert (tmp_path / "home/a1" / FOLDER / "rank0.trace.json.gz").stat().st_mode & 0o077 == 0


def test_only_plain_files_of_the_ranks_leave_a_node(tmp_path, folder):
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    (folder / "rank0.link").symlink_to(secret)
    os.mkfifo(folder / "rank0.pipe")
    (folder / "rank0.folder").mkdir()
    for name in ("rank1.trace.json", ".rank0.hidden", "rank0", "rank0.bad name", "notes.txt"):
        (folder / name).write_text("stays")
    (folder / "rank0.good").write_text("comes")
    assert [message.name for message in sent(folder.parent)] == ["rank0.good"]


def test_a_rank_with_too_much_keeps_its_files_and_the_others_come(tmp_path, folder, caplog):
    with (folder / "rank0.trace.json.gz").open("wb") as file:
        file.truncate(MAX_BYTES_PER_RANK + 1)
    (folder / "rank12.trace.json.gz").write_bytes(b"small")
    assert home_after(tmp_path, sent(folder.parent)) == {"rank12.trace.json.gz": b"small"}
    assert "files of rank 0 stay in" in caplog.text and "64 MiB" in caplog.text


@pytest.mark.parametrize("name", ["../rank0.x", "rank0./../../x", "/etc/rank0.x", "rank0.x\n", "rank0..", "x", ""])
def test_names_that_lead_elsewhere_are_refused(tmp_path, caplog, name):
    piece = FilePiece(attempt_id="a1", token="token", name=name, offset=0, data=b"x", is_last=True)
    assert home_after(tmp_path, [piece]) == {}
    assert "refused because of its name" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_receiver_follows_no_link_and_completes_no_file_with_a_hole(tmp_path, caplog):
    home = tmp_path / "home/a1" / FOLDER
    home.mkdir(parents=True)
    target = tmp_path / "target"
    target.write_text("kept")
    (home / ".rank0.x").symlink_to(target)
    (home / "rank0.x").symlink_to(target)
    first = FilePiece(attempt_id="a1", token="token", name="rank0.x", offset=0, data=b"ab", is_last=False)
    late = FilePiece(attempt_id="a1", token="token", name="rank0.x", offset=4, data=b"ef", is_last=True)
    receiver = FileReceiver(tmp_path / "home")
    receiver.take(first)
    receiver.take(late)
    assert target.read_text() == "kept" and "a piece is missing" in caplog.text
    receiver.take(FilePiece(attempt_id="a1", token="token", name="rank0.x", offset=2, data=b"cd", is_last=True))
    assert (home / "rank0.x").read_bytes() == b"abcd" and not (home / "rank0.x").is_symlink()
    assert target.read_text() == "kept"


def test_more_than_the_limit_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_files, "MAX_BYTES_PER_RANK", 3)
    flood = [
        FilePiece(attempt_id="a1", token="token", name=f"rank0.{i}", offset=0, data=b"xx", is_last=True)
        for i in range(3)
    ]
    assert list(home_after(tmp_path, flood)) == ["rank0.0"]


def test_an_agent_recognises_a_shared_file_system_by_the_mark(tmp_path):
    mark = HomeMark(tmp_path / "home")
    assert HomeMark.is_home(tmp_path / "home", mark.name)
    assert not HomeMark.is_home(tmp_path / "away", mark.name)
    next_one = HomeMark(tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == [next_one.name], "what a killed one left is gone"
    next_one.close()
    assert not HomeMark.is_home(tmp_path / "home", next_one.name)


class Elsewhere(HomeMark):
    """Stands for a controller's file system that no agent sees."""

    def __init__(self, workdir):
        super().__init__(workdir)
        self.close()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.exhaustive
def test_an_agent_on_another_file_system_sends_the_files_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.ray.backend.HomeMark", Elsewhere)
    with connect(ClusterRequest(devices_per_node=2), workdir=tmp_path, preload=PRELOAD) as cluster:
        end = run(cluster, "tests.cluster.file_runner:write_files")
        assert isinstance(end.outcome, Measured)
        folder = Path(end.log_dir) / FOLDER
        for rank in (0, 1):
            trace = folder / f"rank{rank}.trace.json.gz"
            assert gzip.decompress(trace.read_bytes()) == f"rank {rank}".encode()
            assert str(trace.stat().st_ino) != (folder / f"inode-{rank}").read_text(), "written again"
