"""A folder as a power cut leaves it: every change recorded while programs run, then replayed onto a modelled disk.

`build/native/libdisk_recorder.so` (native/cpp/disk_recorder.cpp) records all changes below a folder, in one order for
all processes. `RecordedDisk` replays them up to an event and rebuilds the folder as the disk may have it at that
moment. The model is what POSIX promises and no more; it follows ALICE (Pillai et al., OSDI 2014) and CrashMonkey's
bounded black-box testing (Mohan et al., OSDI 2018):

- A file's content is durable up to its last fsync, fdatasync, msync, syncfs or sync. Of later writes the disk may have
  none, a prefix that is torn inside a write, any 4 KiB blocks, the length without the bytes (zeros), or all.
- A name (of a new file, a link, a folder; a rename; a removal) is durable once its folder was synced. Of a folder's
  later changes the disk has a prefix in their order. fsync of a file promises nothing for its name.
- A rename is atomic: in both folders or in neither, for either name; so is an exchange.
- A name may be there without the content that was written before it.

ext4, XFS and Btrfs promise more (fsync of a new file brings its name, a rename over a file brings its content); what
survives here survives there, as far as their promises hold.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import mmap
import os
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from headrace.config.installation import checkout

LIBRARY = checkout() / "build" / "native" / "libdisk_recorder.so"

_HEADER = struct.Struct("<IIQQQIIII")
_BLOCK = 4096
_RENAME_EXCHANGE = 2
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16


class RecordKind(enum.IntEnum):
    """Kinds of records; the numbers are those of native/cpp/disk_recorder.cpp."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    RENAME = 5
    LINK = 6
    SYMLINK = 7
    UNLINK = 8
    MAKE_FOLDER = 9
    REMOVE_FOLDER = 10
    SYNC = 11
    SYNC_ALL = 12
    #: What a range of a file holds, where single writes were not seen (shared mappings, stdio).
    CONTENT = 13


class Survival(enum.StrEnum):
    """Share of the unsynced changes that a disk has after a power cut."""

    #: Nothing that was not synced.
    SYNCED = "synced"
    #: All names, and of contents what was synced: the classic empty file behind a new name.
    NAMES = "names"
    #: By chance, for each file and each folder.
    MIXED = "mixed"
    #: Everything, as after a killed process and no power cut.
    ALL = "all"


@dataclass(frozen=True)
class Record:
    """One change."""

    kind: RecordKind
    pid: int
    inode: int
    offset: int
    length: int
    flags: int
    path: str
    second_path: str
    data: memoryview

    def __str__(self) -> str:
        place = self.path or f"inode {self.inode}"
        return f"{self.kind.name.lower()} {place}{f' -> {self.second_path}' if self.second_path else ''}"


@dataclass(frozen=True)
class Change:
    """An unsynced change of a file's content: bytes at an offset, or a new length where `data` is None."""

    offset: int
    data: memoryview | None


@dataclass(eq=False)
class File:
    """A file: its durable content, and what was written since."""

    disk: bytearray = field(default_factory=bytearray)
    live: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)
    mode: int = 0o644
    number: int = 0
    #: Of a file of the baseline that is as it was: time of its last change, ns.
    changed_ns: int | None = None

    def change(self, change: Change) -> None:
        self.changed_ns = None
        _apply(self.live, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.disk = bytearray(self.live) if self.pending else self.disk
        self.pending.clear()


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    text: str


@dataclass(eq=False)
class Renaming:
    """One atomic change of names: what each name of each folder stands for afterwards (None: nothing)."""

    number: int
    names: tuple[tuple[Folder, str, Node | None], ...]

    @property
    def folders(self) -> tuple[Folder, ...]:
        return tuple(dict.fromkeys(folder for folder, _, _ in self.names))


@dataclass(eq=False)
class Folder:
    """A folder: its durable names, those that programs see, and the changes between the two in their order."""

    disk: dict[str, Node] = field(default_factory=dict)
    live: dict[str, Node] = field(default_factory=dict)
    pending: list[Renaming] = field(default_factory=list)
    mode: int = 0o755
    number: int = 0


Node = File | Folder | Link


def environment(folder: Path, log: Path, excluded: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of programs whose changes below a folder are recorded.

    Args:
        folder: what is recorded; its present content is the disk's (copy it before: `RecordedDisk` asks for it).
        log: a new file, outside of the folder, for the records.
        excluded: names directly below the folder that are not recorded.

    Raises:
        OSError: the log's lock cannot be made.
    """
    make_turn = ctypes.CDLL(str(LIBRARY)).disk_recorder_make_turn
    number = make_turn(os.fsencode(f"{log}.turn"))
    if number:
        raise OSError(number, os.strerror(number), f"{log}.turn")
    log.touch()
    return {
        "LD_PRELOAD": " ".join(filter(None, (str(LIBRARY), os.environ.get("LD_PRELOAD")))),
        "DISK_RECORDER_FOLDER": str(folder.resolve()),
        "DISK_RECORDER_LOG": str(log.resolve()),
        "DISK_RECORDER_WITHOUT": ":".join(excluded),
    }


@dataclass
class Baseline:
    """Content of a folder before the recording, with its inode numbers: all of it is durable."""

    root: Folder
    inodes: dict[int, File | Folder]

    @staticmethod
    def read(folder: Path, excluded: Sequence[str] = ()) -> Baseline:
        """Read a folder into memory."""
        inodes: dict[int, File | Folder] = {}

        def read(path: Path, top: bool = False) -> Folder:
            stat = path.stat()
            root = Folder(mode=stat.st_mode & 0o7777)
            inodes[stat.st_ino] = root
            for entry in sorted(os.scandir(path), key=lambda e: e.name):
                if top and entry.name in excluded:
                    continue
                node: Node
                if entry.is_symlink():
                    node = Link(str(Path(entry.path).readlink()))
                elif entry.is_dir():
                    node = read(Path(entry.path))
                elif entry.inode() in inodes:
                    node = inodes[entry.inode()]
                elif entry.is_file():
                    content, about = Path(entry.path).read_bytes(), entry.stat()
                    node = File(bytearray(content), bytearray(content), mode=about.st_mode & 0o7777)
                    node.changed_ns = about.st_mtime_ns
                    inodes[entry.inode()] = node
                else:
                    continue
                root.disk[entry.name] = root.live[entry.name] = node
            return root

        return Baseline(read(folder, top=True), inodes)


class Recording:
    """The records of a log, by number from 0."""

    def __init__(self, log: Path, folder: Path) -> None:
        """Open a log.

        Args:
            log: the file of `environment`.
            folder: the recorded folder; paths of records are relative to it.

        Raises:
            ValueError: the log is torn.
        """
        self._root = str(folder.resolve())
        self.records: list[Record] = []
        #: For each record the path that it is about; of a file's changes the name by which it was made.
        self.paths: list[str] = []
        names: dict[int, str] = {}
        if not log.stat().st_size:
            return
        with open(log, "rb") as f:
            data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        position = 0
        while position < len(data):
            kind, pid, inode, offset, length, flags, first, second, _ = _HEADER.unpack_from(data, position)
            position += _HEADER.size
            path = os.fsdecode(bytes(data[position : position + first]))
            second_path = os.fsdecode(bytes(data[position + first : position + first + second]))
            position += first + second
            size = length if kind in (RecordKind.WRITE, RecordKind.CONTENT) else 0
            if position + size > len(data):
                raise ValueError(f"{log}: the last record is torn")
            record = Record(
                RecordKind(kind), pid, inode, offset, length, flags,
                self._below(path), second_path if kind == RecordKind.SYMLINK else self._below(second_path),
                data[position : position + size],
            )  # fmt: skip
            position += size
            self.records.append(record)
            if record.kind in (RecordKind.CREATE, RecordKind.MAKE_FOLDER):
                names[inode] = record.path
            self.paths.append(record.path or names.get(inode, ""))

    def _below(self, path: str) -> str:
        return path[len(self._root) + 1 :] if path.startswith(self._root) else path

    def after_name(self, path: str) -> int:
        """Return how many records there are when a file has its final name durably: its rename and its folder's sync.

        Raises:
            LookupError: there is none.
        """
        renamed = next(
            (n for n, r in enumerate(self.records) if r.kind is RecordKind.RENAME and r.second_path == path), None
        )
        if renamed is None:
            raise LookupError(f"nothing was renamed to {path}")
        folder = path.rpartition("/")[0]
        for number in range(renamed, len(self.records)):
            record = self.records[number]
            if record.kind is RecordKind.SYNC_ALL or (record.kind is RecordKind.SYNC and record.path == folder):
                return number + 1
        raise LookupError(f"the folder of {path} was never synced")


class RecordedDisk:
    """The modelled disk: a baseline and the records replayed onto it, in their order."""

    def __init__(self, baseline: Baseline, recording: Recording) -> None:
        """Begin with the baseline, which is changed from now on: read another one for another disk."""
        self.root = baseline.root
        self._inodes = dict(baseline.inodes)
        self._recording = recording
        #: How many records are replayed.
        self.position = 0
        #: Records that name what the replay does not know: changes before them were not seen.
        self.unknown: list[int] = []
        #: Records before which a rename must have happened that was not seen.
        self.inferred: list[int] = []
        self._dirty: dict[File | Folder, None] = {}
        for number, node in enumerate(self._inodes.values()):
            node.number = number
        self._next_number = len(self._inodes)

    def replay(self, until: int) -> None:
        """Replay the records below number `until`."""
        while self.position < until:
            record = self._recording.records[self.position]
            try:
                self._replay(record)
            except KeyError:
                self.unknown.append(self.position)
            self.position += 1

    def _replay(self, record: Record) -> None:
        kind = record.kind
        if kind is RecordKind.CREATE or kind is RecordKind.MAKE_FOLDER:
            node = File() if kind is RecordKind.CREATE else Folder()
            node.number, self._next_number = self._next_number, self._next_number + 1
            self._inodes[record.inode] = node
            self._rename((*self._parent_of(record.path), node))
        elif kind is RecordKind.SYMLINK:
            self._rename((*self._parent_of(record.path), Link(record.second_path)))
        elif kind is RecordKind.LINK:
            self._rename((*self._parent_of(record.path), self._inodes[record.inode]))
        elif kind is RecordKind.UNLINK or kind is RecordKind.REMOVE_FOLDER:
            self._rename((*self._parent_of(record.path), None))
        elif kind is RecordKind.RENAME:
            self._infer(record.path, record.inode)
            source, target = self._parent_of(record.path), self._parent_of(record.second_path)
            moved = source[0].live[source[1]]
            replaced = target[0].live[target[1]] if record.flags & _RENAME_EXCHANGE else None
            if source != target and moved is not target[0].live.get(target[1]):
                self._rename((*source, replaced), (*target, moved))
        elif kind is RecordKind.SYNC_ALL:
            for node in list(self._dirty):
                self._sync(node)
        elif kind is RecordKind.SYNC:
            self._infer(record.path, record.inode)
            self._sync(self._inodes[record.inode])
        else:
            self._write(self._file(record.inode), record)

    def _write(self, file: File, record: Record) -> None:
        kind, offset = record.kind, record.offset
        changes: list[Change] = []
        if kind is RecordKind.WRITE:
            changes = [Change(offset, record.data)]
        elif kind is RecordKind.TRUNCATE:
            changes = [Change(record.length, None)] if record.length != len(file.live) else []
        elif kind is RecordKind.ALLOCATE:
            end = offset + record.length
            if record.flags & (_PUNCH_HOLE | _ZERO_RANGE):
                zeroed_end = min(end, len(file.live)) if record.flags & _KEEP_SIZE else end
                changes = [Change(offset, memoryview(bytes(max(0, zeroed_end - offset))))]
            elif not record.flags & _KEEP_SIZE and end > len(file.live):
                changes = [Change(end, None)]
        else:
            data = record.data[: max(0, len(file.live) - offset)]
            if file.live[offset : offset + len(data)] != data:
                changes = [Change(offset, data)]
        for change in changes:
            file.change(change)
            self._dirty[file] = None

    def _rename(self, *names: tuple[Folder, str, Node | None]) -> None:
        renaming = Renaming(self.position, names)
        for folder, name, node in names:
            _name(folder.live, name, node)
        for folder in renaming.folders:
            folder.pending.append(renaming)
            self._dirty[folder] = None

    def _infer(self, path: str, inode: int) -> None:
        """Replay a rename that was not seen: a call names a known file by a name that no record gave it."""
        node = self._inodes.get(inode)
        if not path or node is None or self.find(path) is not None:
            return
        source = _name_of(self.root, node)
        if source is not None:
            self.inferred.append(self.position)
            self._rename((*source, None), (*self._parent_of(path), node))

    def _sync(self, node: File | Folder) -> None:
        if isinstance(node, File):
            node.sync()
        else:
            while node.pending:
                _commit(node.pending[0])
        if not node.pending:
            self._dirty.pop(node, None)

    def _file(self, inode: int) -> File:
        node = self._inodes[inode]
        if not isinstance(node, File):
            raise KeyError(inode)
        return node

    def _parent_of(self, path: str) -> tuple[Folder, str]:
        """Return the folder of a path, and the name in it."""
        *parents, name = path.split("/")
        folder = self.root
        for parent in parents:
            child = folder.live[parent]
            if not isinstance(child, Folder):
                raise KeyError(path)
            folder = child
        return folder, name

    def find(self, path: str) -> Node | None:
        """Return what programs see at a path, or None."""
        try:
            folder, name = self._parent_of(path)
        except KeyError:
            return None
        return folder.live.get(name)

    def rebuild(self, target: Path, survival: Survival, seed: int = 0) -> None:
        """Write the folder as the disk has it after a power cut now.

        Args:
            target: a path where nothing is.
            survival: what of the unsynced changes is there.
            seed: of the draws of `Survival.MIXED`.
        """
        names = self._names(survival, seed)
        paths: dict[File, Path] = {}

        def write(folder: Folder, path: Path) -> None:
            path.mkdir()
            path.chmod(folder.mode)
            for name, node in sorted(names.get(folder, folder.disk).items()):
                if isinstance(node, Folder):
                    write(node, path / name)
                elif isinstance(node, Link):
                    (path / name).symlink_to(node.text)
                elif node in paths:
                    os.link(paths[node], path / name)
                else:
                    (path / name).write_bytes(_content(node, survival, seed))
                    (path / name).chmod(node.mode)
                    if node.changed_ns is not None:
                        os.utime(path / name, ns=(node.changed_ns, node.changed_ns))
                    paths[node] = path / name

        write(self.root, target)

    def state(self, survival: Survival, seed: int = 0, excluded: Sequence[str] = ()) -> str:
        """Return a digest of what `rebuild` would write: names, contents and links.

        Args:
            survival: as of `rebuild`.
            seed: as of `rebuild`.
            excluded: names directly below the folder that do not count.
        """
        names = self._names(survival, seed)
        digest = hashlib.blake2b()

        def add(folder: Folder, path: str) -> None:
            for name, node in sorted(names.get(folder, folder.disk).items()):
                if not path and name in excluded:
                    continue
                if isinstance(node, Folder):
                    digest.update(f"folder {path}/{name}\0".encode())
                    add(node, f"{path}/{name}")
                elif isinstance(node, Link):
                    digest.update(f"link {path}/{name}\0{node.text}\0".encode())
                else:
                    digest.update(f"file {path}/{name}\0".encode())
                    digest.update(hashlib.blake2b(_content(node, survival, seed)).digest())

        add(self.root, "")
        return digest.hexdigest()

    def _names(self, survival: Survival, seed: int) -> Mapping[Folder, dict[str, Node]]:
        """Return what names of folders with unsynced changes stand for."""
        dirty = [node for node in self._dirty if isinstance(node, Folder) and node.pending]
        if survival is Survival.SYNCED:
            return {}
        if survival in (Survival.ALL, Survival.NAMES):
            return {folder: folder.live for folder in dirty}
        persisted: dict[Folder, int] = {}
        for folder in dirty:
            draw = random.Random(f"{seed} folder {folder.number}")
            count = len(folder.pending)
            persisted[folder] = draw.choice((0, count, draw.randint(0, count)))
        # A rename over two folders is in both or in neither, and what follows one that is not there is not there.
        settled = False
        while not settled:
            settled = True
            present = {
                renaming: 0
                for folder in dirty
                for renaming in folder.pending[: persisted[folder]]
                if all(renaming in changed.pending[: persisted[changed]] for changed in renaming.folders)
            }
            for folder in dirty:
                for n, renaming in enumerate(folder.pending[: persisted[folder]]):
                    if renaming not in present:
                        persisted[folder], settled = n, False
                        break
        entries = {folder: dict(folder.disk) for folder in dirty}
        for folder in dirty:
            for renaming in folder.pending[: persisted[folder]]:
                for parent, name, node in renaming.names:
                    if parent is folder:
                        _name(entries[folder], name, node)
        return entries

    def differences(self, folder: Path, excluded: Sequence[str] = ()) -> list[str]:
        """Compare what programs see by the records with a real folder; each difference in words.

        A recording that missed nothing has none. `excluded`: names directly below the folder that are not compared.
        """
        return list(_differences(self.root, folder, PurePosixPath(), excluded))


def _differences(node: Folder, real: Path, path: PurePosixPath, excluded: Sequence[str]) -> Iterator[str]:
    entries = {e.name: e for e in os.scandir(real)}
    if path == PurePosixPath():
        entries = {name: entry for name, entry in entries.items() if name not in excluded}
    for name in sorted(entries.keys() | node.live.keys()):
        below, recorded, entry = path / name, node.live.get(name), entries.get(name)
        if entry is None:
            yield f"{below}: recorded, and not there"
        elif entry.is_symlink():
            if not isinstance(recorded, Link) or recorded.text != str(Path(entry.path).readlink()):
                yield f"{below}: another link"
        elif entry.is_dir():
            if isinstance(recorded, Folder):
                yield from _differences(recorded, real / name, below, ())
            else:
                yield f"{below}: a folder that was not recorded"
        elif entry.is_file():
            if not isinstance(recorded, File):
                yield f"{below}: a file that was not recorded"
            elif recorded.live != Path(entry.path).read_bytes():
                yield f"{below}: other content ({len(recorded.live)} bytes recorded, {entry.stat().st_size} there)"


def _name_of(folder: Folder, node: Node) -> tuple[Folder, str] | None:
    """Return a folder and the name in it by which programs see a node; None where it has none."""
    for name, entry in folder.live.items():
        if entry is node:
            return folder, name
        if isinstance(entry, Folder) and (below := _name_of(entry, node)) is not None:
            return below
    return None


def _name(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _commit(renaming: Renaming) -> None:
    """Make a change of names durable, and before it all that came before it in its folders."""
    for folder in renaming.folders:
        while folder.pending and folder.pending[0] is not renaming and folder.pending[0].number < renaming.number:
            _commit(folder.pending[0])
    for folder, name, node in renaming.names:
        _name(folder.disk, name, node)
    for folder in renaming.folders:
        if folder.pending and folder.pending[0] is renaming:
            folder.pending.pop(0)


def _apply(content: bytearray, change: Change, data: memoryview | bytes | None = None) -> None:
    data = change.data if data is None else data
    if data is None:
        if change.offset < len(content):
            del content[change.offset :]
        else:
            content.extend(bytes(change.offset - len(content)))
        return
    if len(content) < change.offset:
        content.extend(bytes(change.offset - len(content)))
    content[change.offset : change.offset + len(data)] = data


def _content(file: File, survival: Survival, seed: int) -> bytes | bytearray:
    """Return the bytes of a file on the disk."""
    if not file.pending or survival in (Survival.SYNCED, Survival.NAMES):
        return file.disk
    if survival is Survival.ALL:
        return file.live
    draw = random.Random(f"{seed} file {file.number}")
    way = draw.choice(("old", "old", "new", "torn", "blocks", "zeros"))
    if way == "old":
        return file.disk
    if way == "new":
        return file.live
    content = bytearray(file.disk)
    if way == "zeros":  # the length is there, the bytes are not
        del content[len(file.live) :]
        content.extend(bytes(len(file.live) - len(content)))
    elif way == "torn":
        last = draw.randrange(len(file.pending))
        for change in file.pending[:last]:
            _apply(content, change)
        torn = file.pending[last]
        if torn.data is not None:
            _apply(content, torn, torn.data[: draw.randint(0, len(torn.data))])
    else:
        live, size = file.live, max(len(file.live), len(content))
        mixed = bytearray(live) if draw.random() < 0.5 else bytearray(content)
        for begin in range(0, size, _BLOCK):
            block = (live, content)[draw.random() < 0.5][begin : begin + _BLOCK]
            end = min(begin + len(block), len(mixed))
            mixed[begin:end] = block[: max(0, end - begin)]
        content = mixed
    return content
