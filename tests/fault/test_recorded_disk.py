"""The recorder of changes and the modelled disk: nothing is missed, and what was not synced may be gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.recorded_disk import LIBRARY, Baseline, RecordedDisk, Recording, RecordKind, Survival, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the recorder stands before Linux's C library")

Disk = Callable[[str], "Recorded"]


class Recorded:
    """A Python program that has run in a folder, and its records."""

    def __init__(self, folder: Path, program: str) -> None:
        self.home, self.baseline, log = folder / "home", Baseline.read(folder / "home"), folder / "log"
        subprocess.run(
            [sys.executable, "-c", f"import os\nos.chdir({str(self.home)!r})\n{_HELP}\n{program}"],
            env={**os.environ, **environment(self.home, log)},
            check=True,
            timeout=60,
        )
        self.recording = Recording(log, self.home)
        self.disk = RecordedDisk(self.baseline, self.recording)
        self.disk.replay(len(self.recording.records))
        self._out = folder

    def after(self, survival: Survival, seed: int = 0) -> dict[str, bytes]:
        """Return the files of the folder after a power cut at the program's end, by path."""
        target = self._out / f"after-{survival}-{seed}"
        self.disk.rebuild(target, survival, seed)
        return {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}


_HELP = """
def put(path, data, sync=False):
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        if sync:
            os.fsync(f.fileno())
def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
"""


@pytest.fixture
def run(tmp_path: Path) -> Disk:
    assert LIBRARY.is_file(), f"{LIBRARY} is not built: make native"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "old").write_bytes(b"old content")
    return lambda program: Recorded(tmp_path, program)


def test_what_was_synced_is_there(run: Disk) -> None:
    ran = run("os.mkdir('f'); put('f/new', b'synced', True); sync('f'); sync('.'); put('old', b'changed', True)")
    assert ran.after(Survival.SYNCED) == {"f/new": b"synced", "old": b"changed"}


def test_a_rename_without_fsync_leaves_an_empty_file(run: Disk) -> None:
    """The classic: the folder was synced and the content was not."""
    ran = run("put('new.partial', b'x' * 10000); os.rename('new.partial', 'new'); sync('.')")
    assert ran.after(Survival.SYNCED) == {"new": b"", "old": b"old content"}
    assert ran.after(Survival.ALL)["new"] == b"x" * 10000


def test_a_rename_over_a_file_leaves_the_old_one_or_the_new_one(run: Disk) -> None:
    ran = run("put('new.partial', b'new content', True); os.rename('new.partial', 'old')")
    assert ran.after(Survival.SYNCED) == {"old": b"old content"}
    assert ran.after(Survival.NAMES) == {"old": b"new content"}


def test_a_name_needs_its_folder_synced(run: Disk) -> None:
    ran = run("put('new', b'content', True)")
    assert ran.after(Survival.SYNCED) == {"old": b"old content"}
    assert ran.after(Survival.NAMES)["new"] == b"content"


def test_a_file_in_a_folder_whose_own_name_was_not_synced_is_lost(run: Disk) -> None:
    ran = run("os.makedirs('a/b'); put('a/b/new', b'content', True); sync('a/b'); sync('a')")
    assert ran.after(Survival.SYNCED) == {"old": b"old content"}


def test_a_removal_without_fsync_may_come_back(run: Disk) -> None:
    ran = run("os.unlink('old')")
    assert ran.after(Survival.SYNCED) == {"old": b"old content"}
    assert ran.after(Survival.NAMES) == {}


def test_syncfs_brings_everything_before_it(run: Disk) -> None:
    ran = run(
        "import ctypes; os.mkdir('a'); put('a/x', b'x'); ctypes.CDLL(None).syncfs(os.open('.', 0)); put('y', b'y')"
    )
    assert ran.after(Survival.SYNCED) == {"a/x": b"x", "old": b"old content"}


def test_a_rename_between_folders_is_in_both_or_in_neither(run: Disk) -> None:
    ran = run("os.mkdir('a'); sync('.'); os.rename('old', 'a/moved'); put('new', b'new'); sync('a')")
    # The target's sync brings the source's removal, too; of what came after it in the source nothing is promised.
    assert ran.after(Survival.SYNCED) == {"a/moved": b"old content"}
    counts = {len([p for p in ran.after(Survival.MIXED, seed) if p in ("old", "a/moved")]) for seed in range(20)}
    assert counts == {1}


def test_an_exchange_of_folders_is_atomic(run: Disk) -> None:
    ran = run(
        "from pathlib import Path; from headrace.storage import system\n"
        "for name in 'ab':\n"
        "    os.mkdir(name); put(f'{name}/file', name.encode(), True); sync(name)\n"
        "sync('.'); assert system.exchange(Path('a'), Path('b'))"
    )
    assert ran.after(Survival.SYNCED) == {"a/file": b"a", "b/file": b"b", "old": b"old content"}
    assert ran.after(Survival.NAMES) == {"a/file": b"b", "b/file": b"a", "old": b"old content"}


def test_chance_takes_each_way_of_an_unsynced_write(run: Disk) -> None:
    """A write of 9 KiB over 6 KiB leaves the old content, all, a torn prefix, the length without bytes, or single
    blocks.
    """
    ran = run("put('data', b'o' * 6144, True); sync('.'); f = open('data', 'r+b'); f.write(b'n' * 9216); f.close()")
    ways = set()
    for seed in range(200):
        data = ran.after(Survival.MIXED, seed)["data"]
        assert set(data) <= set(b"on\0")
        ways.add((len(data) // 3072, b"o" in data, b"n" in data, b"\0" in data))
    assert {(2, True, False, False), (3, False, True, False), (3, True, False, True)} <= ways
    assert any(old and new for _, old, new, _ in ways)


def test_the_same_seed_gives_the_same_disk(run: Disk) -> None:
    ran = run("for n in range(20): put(str(n), os.urandom(100))")
    first = ran.after(Survival.MIXED, 5)
    ran._out = ran._out / "again"
    ran._out.mkdir()
    assert ran.after(Survival.MIXED, 5) == first != ran.after(Survival.MIXED, 6)


EVERY_WAY = """
import mmap, shutil, sqlite3, subprocess, tempfile
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from deltalake import write_deltalake
from safetensors.numpy import save_file

def shell(commands):
    subprocess.run(["bash", "-ec", commands], check=True, stderr=subprocess.DEVNULL)
put("a", b"a" * 5000)
os.makedirs("d/e"); shutil.copy2("a", "d/e/copy"); shutil.copytree("d", "d2"); shutil.rmtree("d")
os.link("a", "hard"); os.symlink("a", "soft"); os.truncate("a", 100)
os.posix_fallocate(os.open("a", os.O_RDWR), 0, 300)
fd = os.open("v", os.O_CREAT | os.O_RDWR)
os.writev(fd, [b"one", b"two"]); os.pwrite(fd, b"X", 4); os.sendfile(fd, os.open("a", 0), 0, 50)
os.lseek(fd, 0, 0); os.copy_file_range(os.open("a", 0), fd, 20)
with open("m", "w+b") as f:
    f.truncate(5000); m = mmap.mmap(f.fileno(), 5000); m[10:20] = b"0123456789"; m.close()
mapped = np.memmap("mm", np.int64, "w+", shape=(100,)); mapped[:] = 7; mapped.flush(); mapped[3] = 1
with tempfile.NamedTemporaryFile(dir=".", delete=False) as f:
    f.write(b"temp")
shell("echo hi > sh; cat sh >> sh2; mv sh2 sh3; cp sh3 sh4; rm sh; mkdir q; mv q q2; rmdir q2")
shell("touch t; dd if=/dev/zero of=dd bs=1000 count=3 seek=2; sort sh3 > so; gzip -k sh3")
shell("tar cf d.tar d2; tar xf d.tar -C d2; sed -i s/hi/ho/ sh3")
db = sqlite3.connect("q.db")
db.execute("create table t(a)"); db.executemany("insert into t values(?)", [(i,) for i in range(900)]); db.commit()
db.execute("delete from t where a % 2"); db.commit(); db.close()
pq.write_table(pa.table({"a": np.arange(10000)}), "p.parquet")
with pa.OSFile("p.arrow", "wb") as sink:
    sink.write(b"1" * 100)
save_file({"a": np.arange(10)}, "s.safetensors"); sync("s.safetensors")
write_deltalake("t1", pa.table({"a": [1, 2]})); write_deltalake("t1", pa.table({"a": [3]}), mode="append")
if not os.fork():
    put("child", b"child")
    os._exit(0)
os.wait()
"""


def test_the_records_make_the_folder_again(run: Disk) -> None:
    """Files changed in every way that we know: by Python, the shell's tools, SQLite, Arrow, Rust, by memory."""
    ran = run(EVERY_WAY)
    assert ran.disk.differences(ran.home) == []
    assert ran.disk.unknown == []


@pytest.mark.jvm
def test_the_jvm_is_recorded(run: Disk, tmp_path: Path) -> None:
    source = tmp_path / "Changes.java"
    source.write_text(
        """
import java.io.*; import java.nio.*; import java.nio.channels.*; import java.nio.file.*;
import static java.nio.file.StandardOpenOption.*;
public class Changes {
  public static void main(String[] home) throws Exception {
    Path at = Path.of(home[0]), stream = at.resolve("stream"), copy = at.resolve("x/y/copy");
    try (FileOutputStream out = new FileOutputStream(stream.toFile())) {
      out.write(new byte[70000]);
      out.getFD().sync();
    }
    try (RandomAccessFile f = new RandomAccessFile(at.resolve("random").toFile(), "rw")) {
      f.setLength(100); f.seek(50); f.writeInt(7);
    }
    try (FileChannel c = FileChannel.open(at.resolve("channel"), CREATE, WRITE);
         FileChannel from = FileChannel.open(stream)) {
      c.write(ByteBuffer.wrap(new byte[] {1, 2, 3}));
      from.transferTo(0, 40000, c);
      c.force(true);
    }
    try (FileChannel c = FileChannel.open(at.resolve("mapped"), CREATE, READ, WRITE)) {
      MappedByteBuffer map = c.map(FileChannel.MapMode.READ_WRITE, 0, 1000);
      map.put(5, (byte) 9);
      map.force();
    }
    Files.createDirectories(copy.getParent()); Files.copy(stream, copy);
    Files.move(copy, at.resolve("x/moved"), StandardCopyOption.ATOMIC_MOVE); Files.delete(copy.getParent());
    Files.createLink(at.resolve("hard"), stream); Files.createSymbolicLink(at.resolve("soft"), stream);
  }
}
"""
    )
    ran = run(f"import subprocess; subprocess.run(['java', {str(source)!r}, {str(tmp_path / 'home')!r}], check=True)")
    assert ran.disk.differences(ran.home) == []
    assert ran.disk.unknown == []
    assert {r.kind for r in ran.recording.records} >= {RecordKind.SYNC, RecordKind.RENAME, RecordKind.WRITE}


def test_many_processes_share_one_order(run: Disk) -> None:
    """Eight append to one file and rename over one name: the records give the same file and the same last name."""
    ran = run(
        "for n in range(8):\n"
        "    if not os.fork():\n"
        "        for i in range(200):\n"
        "            fd = os.open('shared', os.O_CREAT | os.O_APPEND | os.O_WRONLY)\n"
        "            os.write(fd, b'%d %d\\n' % (n, i)); os.close(fd)\n"
        "            put(f'{n}.partial', b'%d' % n); os.rename(f'{n}.partial', 'last')\n"
        "        os._exit(0)\n"
        "for n in range(8): os.wait()"
    )
    assert ran.disk.differences(ran.home) == []
    assert len((ran.home / "shared").read_bytes().splitlines()) == 1600


def test_a_missed_change_shows(run: Disk) -> None:
    ran = run("put('new', b'x')")
    (ran.home / "new").write_bytes(b"y")
    (ran.home / "other").write_bytes(b"")
    (ran.home / "old").unlink()
    assert len(ran.disk.differences(ran.home)) == 3


def test_a_state_is_what_is_rebuilt(run: Disk) -> None:
    """Cuts are one state where the same names have the same bytes, and only there."""
    ran = run("put('new', b'x', True); put('old', b'y'); os.mkdir('f'); put('f/g', b'z')")
    cases = [(s, seed) for s in Survival for seed in range(6)]
    contents: dict[str, set[str]] = {}
    for survival, seed in cases:
        tree = ran.after(survival, seed)
        folders = sorted(p.name for p in (ran.home.parent / f"after-{survival}-{seed}").rglob("*") if p.is_dir())
        contents.setdefault(ran.disk.state(survival, seed), set()).add(repr((sorted(tree.items()), folders)))
    assert {len(written) for written in contents.values()} == {1}
    assert len({written for group in contents.values() for written in group}) == len(contents) > 3
    partial_states = {ran.disk.state(survival, seed, ("new", "old", "f")) for survival, seed in cases}
    assert len(partial_states) == 1
