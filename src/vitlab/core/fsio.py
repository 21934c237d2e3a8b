"""Atomic writes: a crash at any moment leaves the old state or the new one.

Owns the order of operations: write to a temporary name, fsync, manifest, rename, fsync of the parent. Each primitive
operation is announced to `intercept` first, so that fault tests can enumerate them and fail or kill at the k-th.
"""

import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from vitlab.core import reading
from vitlab.core.environment import CACHE_VARIABLE, cache_folder
from vitlab.core.errors import FileProblem, Unreadable, UsageError

MANIFEST = "manifest.json"
LOCK = ".lock"
_MANIFEST_BYTES = 2**23
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_PIECE = 2**18  # bytes in one write; with 4 MiB, ext4 on Linux 6.18 took five times as long
_PIECES_AHEAD = 512  # written but not hashed yet: 128 MB at most, mostly views of what is in memory anyway
_BURST = 2**27  # bytes between syncs
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Operation = Literal["mkdir", "create", "write", "append", "fsync", "rename", "remove"]
Listener = Callable[[Operation, Path], None]
Chunks = Iterable[bytes | memoryview]  # the parts of a file too large for memory
_listeners: list[Listener] = []


@contextlib.contextmanager
def intercept(listener: Listener) -> Generator[None]:
    """Call `listener(operation, path)` before each disk operation, for fault tests."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _announce(operation: Operation, path: Path) -> None:
    for listener in _listeners:
        listener(operation, path)


# --- primitive operations: nothing else in vitlab changes the disk ----------------------------------------------------


def _mkdir(path: Path) -> None:
    _announce("mkdir", path)
    path.mkdir()


class _NoRoom(OSError):
    """Disk full: `needed` bytes in all, of which `taken` are written and get freed."""

    def __init__(self, error: OSError, needed: int, taken: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.needed, self.taken = needed, taken


def _write(path: Path, data: Chunks) -> int:
    """Write and sync a new file; return its size in bytes."""
    chunks = iter(data)
    written = announced = synced = 0
    chunk: bytes | memoryview = b""
    try:
        _announce("create", path)
        with path.open("xb") as file:
            for chunk in chunks:
                if written >= announced:  # once for each `_PIECE`; small chunks go to the disk together
                    _announce("write", path)
                    announced = written + _PIECE
                file.write(chunk)
                written, chunk = written + len(chunk), b""
                # The disk works while the next chunks are made, and the last sync has little left.
                if written >= synced + _BURST:
                    file.flush()
                    os.fsync(file.fileno())
                    synced = written
            file.flush()
            _announce("fsync", path)
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        taken = path.stat().st_size if path.exists() else 0
        raise _NoRoom(error, written + len(chunk) + sum(map(len, chunks)), taken) from error
    return written


def _fsync_folder(path: Path) -> None:
    _announce("fsync", path)
    if os.name == "nt":  # Windows cannot open a folder; its renames are journalled
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(source: Path, target: Path) -> None:
    _announce("rename", target)
    source.replace(target)


def _rename_new(source: Path, target: Path) -> None:
    """As `_rename`, but never over a file that another process put there meanwhile."""
    _announce("rename", target)
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links; there the check that nothing stands at `target` must do
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        source.replace(target)
    else:
        _remove(source)


def _remove(path: Path) -> None:
    """Remove a file, or a folder and its files one by one."""
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            _remove(inner)
        _announce("remove", path)
        path.rmdir()
    else:
        _announce("remove", path)
        path.unlink(missing_ok=True)


# --- what the rest of vitlab uses -------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes | str | Chunks) -> None:
    """Replace the file at `path` atomically."""
    _write_file(path, data, _rename)


def write_new_file(path: Path, data: bytes | str | Chunks) -> None:
    """As `write_file`, but raise if `path` exists, also for a racing process."""
    _write_file(path, data, _rename_new)


def _write_file(path: Path, data: bytes | str | Chunks, publish: Callable[[Path, Path], None]) -> None:
    temporary = _temporary_beside(path)
    with _explained(path):
        try:
            _write(temporary, _chunks(data))
            publish(temporary, path)
        except BaseException:
            _discard(temporary)
            raise
        _fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, json_text(value))


def append_line(path: Path, line: str) -> None:
    """Append one line to a log; a crash can cut that line short, nothing before it."""
    if path.exists() and not path.is_file():
        raise FileProblem(f"{path} is not a regular file")  # opening a pipe would block forever
    with _explained(path):
        _announce("append", path)
        with path.open("a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")


def make_folder(path: Path) -> Path:
    """Create `path` and its missing parents, each on the disk before the next."""
    with _explained(path):
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                with contextlib.suppress(FileExistsError):  # another process was faster
                    _mkdir(folder)
                _fsync_folder(folder.parent)
    if not path.is_dir():
        raise FileProblem(f"{path} is a file, but a folder is needed there", hint="Choose another --out.")
    return path


def require_free(path: Path) -> Path:
    """Raise unless `path` does not exist and could be created; before work begins."""
    try:
        if "\0" in str(path):
            raise ValueError("a name cannot hold a zero byte")
        str(path).encode()  # reports and logs name it, and a name that is not text would fail them after the work
        taken = path.exists() or path.is_symlink()
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be searched
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{str(path)!r} cannot be made: {reason}", hint="Choose another --out.") from None
    if taken:
        raise Taken(path)
    if not parent.is_dir():
        raise UsageError(f"{path} cannot be made: {parent} is a file", hint="Choose another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be made: no permission to write in {parent}", hint="Choose another --out.")
    return path


class Taken(UsageError):
    """`path` exists already, perhaps made a moment ago by another process."""

    def __init__(self, path: Path) -> None:
        hint = "Choose another --out, or move the old one away."
        super().__init__(f"{path} exists already, and nothing saved is overwritten", hint=hint)
        self.path = path


class NewFolder:
    """A folder under construction, with a SHA-256 manifest; nothing is at `path` before `publish`.

    Several processes on one file system can write one folder together: they agree on a `token` first, one makes it, each
    writes files of different names, and one publishes it when all have written. `size` is what all files take together, if
    known, so that a full disk is reported with the total need.
    """

    def __init__(self, path: Path, token: str, *, size: int = 0) -> None:
        self._path = path.with_name(f".{path.name}.{token}.tmp")
        self._final = path  # named in errors, because the temporary name means nothing to a reader
        self._size = size
        self._written = 0
        self.hashes: dict[str, str] = {}  # of what this process wrote

    @staticmethod
    def new_token() -> str:
        return secrets.token_hex(4)

    def make(self) -> None:
        require_free(self._final)
        make_folder(self._final.parent)
        with _explained(self._final, size=self._size):
            _mkdir(self._path)

    def write(self, name: str, data: bytes | str | Chunks) -> None:
        digest = hashlib.sha256()
        with _explained(self._final):
            try:
                with contextlib.closing(_hashed(_chunks(data), digest.update)) as chunks:  # ends its thread
                    self._written += _write(self._path / name, chunks)
            except _NoRoom as full:  # all of the folder must find room, not this file alone
                needed = max(self._size, self._written + full.needed)
                raise _NoRoom(full, needed, self._written + full.taken) from full
        self.hashes[name] = digest.hexdigest()

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json_text(value))

    def publish(self, hashes: Mapping[str, str] | None) -> None:
        """Write the manifest of `hashes`, which are those of all processes, and give the folder its name."""
        if hashes is not None:
            self.write_json(MANIFEST, {"sha256": dict(sorted(hashes.items()))})
        with _explained(self._final):
            _fsync_folder(self._path)
            _rename(self._path, self._final)
            _fsync_folder(self._final.parent)

    def discard(self) -> None:
        _discard(self._path)


@contextlib.contextmanager
def new_folder(path: Path, *, size: int = 0, manifest: bool = True) -> Generator[NewFolder]:
    """Build a folder beside its final place, then rename it there.

    The target must not exist: an existing folder may be the user's only copy. A folder that will keep changing has no manifest.
    """
    folder = NewFolder(path, NewFolder.new_token(), size=size)
    folder.make()
    try:
        yield folder
        folder.publish(folder.hashes if manifest else None)
    except BaseException:
        folder.discard()
        raise


_RESUMES = "Free some space there and run the same command again: it resumes."


class PartialFile:
    """A file under construction that outlives its process, to be resumed.

    Made by `partial_file`, which sees to it that no two processes hold the same one.
    """

    def __init__(self, file: IO[bytes], path: Path, final: Path) -> None:
        self._file = file
        self._final = final
        self.path = path
        self.size = file.seek(0, os.SEEK_END)

    def append(self, chunk: bytes) -> None:
        with _explained(self._final, _RESUMES):
            _announce("append", self.path)
            self._file.write(chunk)
            self._file.flush()
        self.size += len(chunk)

    def restart(self) -> None:
        """Truncate to nothing."""
        with _explained(self._final, _RESUMES):
            _announce("write", self.path)
            self._file.truncate(0)
        self.size = 0

    def publish(self) -> None:
        """Rename the complete file to its final name."""
        with _explained(self._final, _RESUMES):
            _announce("fsync", self.path)
            os.fsync(self._file.fileno())
            if os.name == "nt":  # Windows renames no open file, and nobody else can take one there
                self._file.close()
            _rename(self.path, self._final)
            _fsync_folder(self._final.parent)

    def discard(self) -> None:
        self._file.close()
        with _explained(self._final, _RESUMES):
            _remove(self.path)


@contextlib.contextmanager
def partial_file(final: Path, waiting: Callable[[], None]) -> Generator[PartialFile]:
    """Open the partial file of `final`, locked; `waiting` is called if it is taken."""
    # Without POSIX locks each process gets a file of its own, and starts from nothing.
    path = final.with_name(f".{final.name}.partial") if os.name == "posix" else _temporary_beside(final)
    with _explained(final, _RESUMES):
        file = _open_locked(path, waiting)
    try:
        yield PartialFile(file, path, final)
    finally:
        with contextlib.suppress(OSError):  # a full disk was reported by the write that met it
            file.close()


def _open_locked(path: Path, waiting: Callable[[], None]) -> IO[bytes]:
    while True:
        _announce("append", path)
        file = path.open("ab")
        try:
            if not _lock(file, wait=False):
                waiting()
                _lock(file, wait=True)
            # Whoever had it may have renamed or removed it meanwhile; then this is a lock on nothing.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    """Whether this process got the lock, which the system frees when its holder ends."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_soon(file: IO[bytes]) -> bool:
    """Retry for a second: a just-forked child may briefly hold a dead parent's lock."""
    for _ in range(_TRIES):
        if _lock(file, wait=False):
            return True
        time.sleep(_PAUSE_S)
    return False


_TRIES, _PAUSE_S = 20, 0.05  # a second in all
_held: set[IO[bytes]] = set()  # the locks of this process


def _let_go() -> None:
    """Close inherited locks in a forked child, which would outlive their holder."""
    for file in _held:
        file.close()
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


def remove_file(path: Path) -> None:
    """Remove a file, if it exists."""
    with _explained(path):
        _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a published folder, manifest first, so that a crash leaves no valid one."""
    with _explained(path):
        _remove(path / MANIFEST)
        _fsync_folder(path)
        _remove(path)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Lock the folder for this process; raise after a second if another one has it.

    Half-written files of killed processes are removed: while the lock is held, no other process can be writing them.
    """
    with _explained(folder / LOCK):
        _announce("append", folder / LOCK)
        if (folder / LOCK).exists():  # a FIFO would be waited for
            reading.require_regular(folder / LOCK, (folder / LOCK).stat())
        file = (folder / LOCK).open("ab")
    _held.add(file)
    try:
        if not _lock_soon(file):
            raise FileProblem(f"{folder} is in use by another process", hint="Wait for it, or stop it.")
        _clear(folder)
        yield
    finally:
        _held.discard(file)
        file.close()


def _clear(folder: Path) -> None:
    """Remove leftovers of killed processes, except in folders that have a lock."""
    for place, folders, files in os.walk(folder):  # tolerates what other processes remove meanwhile
        if LOCK in files and Path(place) != folder:
            folders.clear()  # goes no deeper
            continue
        for name in filter(_LEFTOVER.fullmatch, (*folders, *files)):
            _discard(Path(place) / name)


def verify_folder(path: Path, required: Iterable[str] = (), *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Check every file of a folder against its manifest; return the file names.

    What is `required` must be listed: a file that is not in the manifest would go unchecked. `share` (i, n) checks
    every n-th file from the i-th on, where n processes do the rest together.
    """
    try:
        reading.require_inside(path / MANIFEST, path)
        manifest = reading.read_json(path / MANIFEST, _MANIFEST_BYTES, unique=True)
        expected = {str(name): str(digest) for name, digest in manifest["sha256"].items()}
    except FileNotFoundError:
        raise FileProblem(f"{path} has no {MANIFEST}, so it is not a complete vitlab folder") from None
    except OSError as error:
        raise Unreadable(f"{path / MANIFEST} cannot be read: {error.strerror}") from error
    except (LookupError, TypeError, AttributeError):
        raise FileProblem(f"{path / MANIFEST} does not list files with their SHA-256") from None
    for name in required:
        if name not in expected:
            raise FileProblem(f"{path / MANIFEST} does not list {name}", hint="Copy the whole folder again.")
    for name, digest in list(expected.items())[share[0] :: share[1]]:
        if Path(name).name != name:
            raise FileProblem(f"{path / MANIFEST} names a file outside its folder: {name!r}")
        try:
            reading.require_inside(path / name, path)
            found = hash_file(path / name)
        except (FileNotFoundError, ValueError):  # the latter for names that no file can have
            raise FileProblem(
                f"{path / name} is missing, though the manifest lists it", hint="Copy the whole folder again."
            ) from None
        except OSError as error:
            raise Unreadable(f"{path / name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise FileProblem(
                f"{path / name} is damaged: its SHA-256 is not the one in the manifest",
                hint="Copy the whole folder again.",
            )
    return list(expected)


@contextlib.contextmanager
def verifying(path: Path, required: Iterable[str] = (), *, share: tuple[int, int] = (0, 1)) -> Generator[None]:
    """Run `verify_folder` in a thread while the files are read; raise at the end.

    A damaged file is reported as such, whatever else its reader reports.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_folder, path, tuple(required), share=share)
        try:
            yield
        finally:
            verified.result()


@contextlib.contextmanager
def scratch_folder() -> Generator[Path]:
    """A folder among the system's temporary ones, for libraries that write files and nothing else; gone at the end."""
    with _explained(Path(tempfile.gettempdir()) / "vitlab"), tempfile.TemporaryDirectory(prefix="vitlab-") as name:
        yield Path(name)


def file_chunks(path: Path) -> Generator[bytes]:
    """Yield what is in a file, piece by piece."""
    with reading.open_regular(path) as file:
        while piece := file.read(_PIECE):
            yield piece


def hash_file(path: Path) -> str:
    with reading.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _chunks(data: bytes | str | Chunks) -> Iterator[memoryview]:
    """What is to be written, in pieces of at most `_PIECE` bytes."""
    content = data.encode() if isinstance(data, str) else data
    for chunk in (content,) if isinstance(content, bytes) else content:
        view = memoryview(chunk)
        for at in range(0, len(view), _PIECE):
            yield view[at : at + _PIECE]


def _hashed(chunks: Iterator[memoryview], update: Callable[[memoryview], object]) -> Generator[memoryview]:
    """Hash the chunks in a thread while they are written."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting: collections.deque[concurrent.futures.Future[object]] = collections.deque()
        for chunk in chunks:
            waiting.append(pool.submit(update, chunk))
            if len(waiting) > _PIECES_AHEAD:
                waiting.popleft().result()
            yield chunk


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _discard(path: Path) -> None:
    """Remove what a failed write left, without hiding the failure."""
    with contextlib.suppress(OSError):
        if path.exists():
            _remove(path)


@contextlib.contextmanager
def _explained(path: Path, hint: str | None = None, size: int = 0) -> Generator[None]:
    """Turn an OSError into a FileProblem that names the file, and the free space.

    `size` is what will be needed, where that is known before anything is written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process was faster
            raise Taken(path) from error
        room = ""
        with contextlib.suppress(OSError, StopIteration):
            existing = next(folder for folder in path.absolute().parents if folder.exists())
            free = shutil.disk_usage(existing).free
            needed, taken = size if error.errno in _NO_ROOM else 0, 0
            if isinstance(error, _NoRoom):
                needed, taken = error.needed, error.taken
            room = f" ({f'{needed:,} bytes needed, ' if needed else ''}{free + taken:,} bytes free there)"
        if hint is None:
            kept = path.absolute().is_relative_to(cache_folder().absolute())
            hint = (
                f"{f'Set {CACHE_VARIABLE} to another folder' if kept else 'Choose another --out'}, or free some space."
            )
        raise FileProblem(f"cannot write {path}: {error.strerror or error}{room}", hint=hint) from error
