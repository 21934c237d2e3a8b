"""Every write to disk goes through here, so that a crash at any moment leaves the old state or the new one, never a mixture.

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
Chunks = Iterable[bytes | memoryview]  # the parts of a file too large to stand in memory whole
_listeners: list[Listener] = []


@contextlib.contextmanager
def intercept(listener: Listener) -> Generator[None]:
    """Calls `listener(operation, path)` before each primitive operation; what it raises takes the operation's place."""
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
    """A write that the disk had no room for: `needed` bytes in all, of which `taken` are there and will be given back."""

    def __init__(self, error: OSError, needed: int, taken: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.needed, self.taken = needed, taken


def _write(path: Path, data: Chunks) -> int:
    """Returns how many bytes there were."""
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
    """Takes a file away, or a folder with all that is in it, one by one."""
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
    """Puts `data` at `path` in one step: a reader sees the old content or the new, whole."""
    _write_file(path, data, _rename)


def write_new_file(path: Path, data: bytes | str | Chunks) -> None:
    """As `write_file`, at a place that must be free: of two processes that write there, one is told so."""
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
    """Adds one line to a log. A crash can cut the last line short, which readers must bear; nothing before it is touched."""
    if path.exists() and not path.is_file():
        raise FileProblem(f"{path} is not a regular file")  # opening a pipe would wait for ever
    with _explained(path):
        _announce("append", path)
        with path.open("a", encoding="utf-8") as file:
            file.write(line.rstrip("\n") + "\n")


def make_folder(path: Path) -> Path:
    """Makes `path` and its missing parents, each on the disk before the next."""
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
    """`path` if nothing stands there and its nearest existing parent can be written; checked before work begins."""
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
    """Something stands at `path` already, perhaps since a moment ago, from another process."""

    def __init__(self, path: Path) -> None:
        hint = "Choose another --out, or move the old one away."
        super().__init__(f"{path} exists already, and nothing saved is overwritten", hint=hint)
        self.path = path


class NewFolder:
    """A folder under construction: files go in by name, and `new_folder` publishes them together."""

    def __init__(self, path: Path, final: Path, size: int) -> None:
        self._path = path
        self._final = final  # named in errors, because the temporary place means nothing to a reader
        self._size = size
        self._written = 0
        self._hashes: dict[str, str] = {}

    def write(self, name: str, data: bytes | str | Chunks) -> None:
        digest = hashlib.sha256()
        with _explained(self._final):
            try:
                self._written += _write(self._path / name, _hashed(_chunks(data), digest.update))
            except _NoRoom as full:  # all of the folder must find room, not this file alone
                needed = max(self._size, self._written + full.needed)
                raise _NoRoom(full, needed, self._written + full.taken) from full
        self._hashes[name] = digest.hexdigest()

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json_text(value))

    def _seal(self, manifest: bool) -> None:
        if manifest:
            self.write_json(MANIFEST, {"sha256": dict(sorted(self._hashes.items()))})
        _fsync_folder(self._path)


@contextlib.contextmanager
def new_folder(path: Path, *, size: int = 0, manifest: bool = True) -> Generator[NewFolder]:
    """Builds a folder with a SHA-256 manifest beside its final place and renames it there when it is whole.

    The target must not exist: an existing folder may be somebody's only copy. `size` is what all its files will take, where
    the caller knows, so that a full disk is told with the whole need. A folder that will go on changing has no `manifest`.
    """
    require_free(path)
    make_folder(path.parent)
    temporary = _temporary_beside(path)
    folder = NewFolder(temporary, path, size)
    try:
        with _explained(path, size=size):
            _mkdir(temporary)
        yield folder
        with _explained(path):
            folder._seal(manifest)
            _rename(temporary, path)
    except BaseException:
        _discard(temporary)
        raise
    with _explained(path):
        _fsync_folder(path.parent)


class JointFolder(NewFolder):
    """As `new_folder`, by several processes on one file system. Each writes files of its own names; one makes and publishes.

    They agree on a `token` first, and between these steps: everyone may write when it is made, and publish when all have
    written. Until then there is nothing at `path`.
    """

    def __init__(self, path: Path, token: str, *, size: int = 0) -> None:
        super().__init__(path.with_name(f".{path.name}.{token}.tmp"), path, size)

    @staticmethod
    def new_token() -> str:
        return secrets.token_hex(4)

    @property
    def hashes(self) -> dict[str, str]:
        """Of what this process wrote."""
        return dict(self._hashes)

    def make(self) -> None:
        require_free(self._final)
        make_folder(self._final.parent)
        with _explained(self._final, size=self._size):
            _mkdir(self._path)

    def publish(self, hashes: Mapping[str, str]) -> None:
        """With the hashes of all processes."""
        self._hashes = dict(hashes)
        with _explained(self._final):
            self._seal(manifest=True)
            _rename(self._path, self._final)
            _fsync_folder(self._final.parent)

    def discard(self) -> None:
        _discard(self._path)


_GOES_ON = "Make room there and run the same again: it goes on where it stopped."


class PartialFile:
    """A file under construction that outlives its process: what is there after a crash is gone on with, not lost.

    Made by `growing_file`, which sees to it that no two processes hold the same one.
    """

    def __init__(self, file: IO[bytes], path: Path, final: Path) -> None:
        self._file = file
        self._final = final
        self.path = path
        self.size = file.seek(0, os.SEEK_END)

    def append(self, chunk: bytes) -> None:
        with _explained(self._final, _GOES_ON):
            _announce("append", self.path)
            self._file.write(chunk)
            self._file.flush()
        self.size += len(chunk)

    def restart(self) -> None:
        """Throws away what is there."""
        with _explained(self._final, _GOES_ON):
            _announce("write", self.path)
            self._file.truncate(0)
        self.size = 0

    def publish(self) -> None:
        """Puts the file in its place, whole."""
        with _explained(self._final, _GOES_ON):
            _announce("fsync", self.path)
            os.fsync(self._file.fileno())
            if os.name == "nt":  # Windows renames no open file, and nobody else can take one there
                self._file.close()
            _rename(self.path, self._final)
            _fsync_folder(self._final.parent)

    def discard(self) -> None:
        self._file.close()
        with _explained(self._final, _GOES_ON):
            _remove(self.path)


@contextlib.contextmanager
def growing_file(final: Path, waiting: Callable[[], None]) -> Generator[PartialFile]:
    """The unfinished part of `final`, beside it, for this process alone. Calls `waiting` if another one has it."""
    # Without POSIX locks each process gets a file of its own, and starts from nothing.
    path = final.with_name(f".{final.name}.partial") if os.name == "posix" else _temporary_beside(final)
    with _explained(final, _GOES_ON):
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
    """Whether this process has it now. The system frees it when the holder ends, however that ends."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_soon(file: IO[bytes]) -> bool:
    """A process that was forked just before its parent was killed has the parent's lock until it first runs."""
    for _ in range(_TRIES):
        if _lock(file, wait=False):
            return True
        time.sleep(_PAUSE_S)
    return False


_TRIES, _PAUSE_S = 20, 0.05  # a second in all
_held: set[IO[bytes]] = set()  # the locks of this process


def _let_go() -> None:
    """In a process that was forked, to load images say: its parent's locks would outlive their holder with it."""
    for file in _held:
        file.close()
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go)


def remove_file(path: Path) -> None:
    """Takes one file away; it is no error that there was none."""
    with _explained(path):
        _remove(path)


def remove_folder(path: Path) -> None:
    """Takes away a folder that `new_folder` made. Its manifest goes first: what a crash leaves is not a folder of ours."""
    with _explained(path):
        _remove(path / MANIFEST)
        _fsync_folder(path)
        _remove(path)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """The folder for this process alone, while it lasts; whoever comes second is told after a second, not kept waiting.

    What a killed process left half written is cleared away: nobody else can be writing it.
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
    """Takes leftovers away. A folder inside that has a lock of its own may be somebody else's: who locks it clears it."""
    for place, folders, files in os.walk(folder):  # which bears that others remove what is theirs meanwhile
        if LOCK in files and Path(place) != folder:
            folders.clear()  # goes no deeper
            continue
        for name in filter(_LEFTOVER.fullmatch, (*folders, *files)):
            _discard(Path(place) / name)


def verify_folder(path: Path, required: Iterable[str] = (), *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """The file names of a folder made by `new_folder`, after every one was checked against the manifest.

    What is `required` must be listed: a file that the manifest does not know was checked by nobody. `share` (i, n) checks
    every n-th file from the i-th on, where n processes do the rest together.
    """
    try:
        reading.require_inside(path / MANIFEST, path)
        manifest = reading.read_json(path / MANIFEST, _MANIFEST_BYTES, unique=True)
        expected = {str(name): str(digest) for name, digest in manifest["sha256"].items()}
    except FileNotFoundError:
        raise FileProblem(f"{path} has no {MANIFEST}, so it is not a whole vitlab folder") from None
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
    """`verify_folder` in a thread, beside the reading of what it verifies: nothing read is used before it has agreed.

    A damaged file is told as such, whatever the reading found strange in it.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_folder, path, tuple(required), share=share)
        try:
            yield
        finally:
            verified.result()


def hash_file(path: Path) -> str:
    with reading.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _chunks(data: bytes | str | Chunks) -> Iterator[memoryview]:
    """What is to be written, in pieces of at most `_PIECE` bytes."""
    whole = data.encode() if isinstance(data, str) else data
    for chunk in (whole,) if isinstance(whole, bytes) else whole:
        view = memoryview(chunk)
        for at in range(0, len(view), _PIECE):
            yield view[at : at + _PIECE]


def _hashed(chunks: Iterator[memoryview], update: Callable[[memoryview], object]) -> Iterator[memoryview]:
    """The same chunks, hashed by a thread while they are written: hashing takes longer than writing."""
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
    """Clears what a failed write left behind, without hiding the failure itself."""
    with contextlib.suppress(OSError):
        if path.exists():
            _remove(path)


@contextlib.contextmanager
def _explained(path: Path, hint: str | None = None, size: int = 0) -> Generator[None]:
    """Turns the operating system's refusal into a sentence that names the file, and the space when that is the reason.

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
            hint = f"{f'Set {CACHE_VARIABLE} to another folder' if kept else 'Choose another --out'}, or make room."
        raise FileProblem(f"cannot write {path}: {error.strerror or error}{room}", hint=hint) from error
