"""Every write to disk goes through here, so that a crash at any moment leaves the old state or the new one, never a mixture.

Owns the order of operations: write to a temporary name, fsync, manifest, rename, fsync of the parent. Each primitive
operation is announced to `intercept` first, so that fault tests can enumerate them and fail or kill at the k-th.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Literal

from vitlab.core.errors import FileProblem, UsageError

MANIFEST = "manifest.json"

Operation = Literal["mkdir", "write", "append", "fsync", "rename", "remove"]
Listener = Callable[[Operation, Path], None]
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


def _write(path: Path, data: bytes) -> None:
    _announce("write", path)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        _announce("fsync", path)
        os.fsync(file.fileno())


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


def _remove(path: Path) -> None:
    _announce("remove", path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- what the rest of vitlab uses -------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes | str) -> None:
    """Puts `data` at `path` in one step: a reader sees the old content or the new, whole."""
    temporary = _temporary_beside(path)
    with _explained(path):
        try:
            _write(temporary, data.encode() if isinstance(data, str) else data)
            _rename(temporary, path)
        except BaseException:
            _discard(temporary)
            raise
        _fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, json_text(value))


def append_line(path: Path, line: str) -> None:
    """Adds one line to a log. A crash can cut the last line short, which readers must bear; nothing before it is touched."""
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
        str(
            path
        ).encode()  # reports and logs name this place, and a name that is no text would fail them after the work
        taken = path.exists() or path.is_symlink()
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be searched
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{str(path)!r} cannot be made: {reason}", hint="Choose another --out.") from None
    if taken:
        raise UsageError(
            f"{path} exists already, and nothing saved is overwritten",
            hint="Choose another --out, or move the old one away.",
        )
    if not parent.is_dir():
        raise UsageError(f"{path} cannot be made: {parent} is a file", hint="Choose another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be made: no permission to write in {parent}", hint="Choose another --out.")
    return path


class NewFolder:
    """A folder under construction: files go in by name, and `new_folder` publishes them together."""

    def __init__(self, path: Path, final: Path) -> None:
        self._path = path
        self._final = final  # named in errors, because the temporary place means nothing to a reader
        self._hashes: dict[str, str] = {}

    def write(self, name: str, data: bytes | str) -> None:
        raw = data.encode() if isinstance(data, str) else data
        with _explained(self._final):
            _write(self._path / name, raw)
        self._hashes[name] = hashlib.sha256(raw).hexdigest()

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json_text(value))

    def _seal(self) -> None:
        _write(self._path / MANIFEST, json_text({"sha256": dict(sorted(self._hashes.items()))}).encode())
        _fsync_folder(self._path)


@contextlib.contextmanager
def new_folder(path: Path) -> Generator[NewFolder]:
    """Builds a folder with a SHA-256 manifest beside its final place and renames it there when it is whole.

    The target must not exist: an existing folder may be somebody's only copy.
    """
    require_free(path)
    make_folder(path.parent)
    temporary = _temporary_beside(path)
    folder = NewFolder(temporary, path)
    try:
        with _explained(path):
            _mkdir(temporary)
        yield folder
        with _explained(path):
            folder._seal()
            _rename(temporary, path)
    except BaseException:
        _discard(temporary)
        raise
    with _explained(path):
        _fsync_folder(path.parent)


def verify_folder(path: Path, required: Iterable[str] = ()) -> list[str]:
    """The file names of a folder made by `new_folder`, after every one was checked against the manifest.

    What is `required` must be listed: a file that the manifest does not know was checked by nobody.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text, object_pairs_hook=_unique_keys)
        expected = {str(name): str(digest) for name, digest in manifest["sha256"].items()}
    except FileNotFoundError:
        raise FileProblem(f"{path} has no {MANIFEST}, so it is not a whole vitlab folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileProblem(f"{path / MANIFEST} cannot be read: {error}") from error
    for name in required:
        if name not in expected:
            raise FileProblem(f"{path / MANIFEST} does not list {name}", hint="Copy the whole folder again.")
    for name, digest in expected.items():
        if Path(name).name != name:
            raise FileProblem(f"{path / MANIFEST} names a file outside its folder: {name!r}")
        try:
            found = hash_file(path / name)
        except (OSError, ValueError):  # the latter for names that no file can have
            raise FileProblem(
                f"{path / name} is missing, though the manifest lists it", hint="Copy the whole folder again."
            ) from None
        if found != digest:
            raise FileProblem(
                f"{path / name} is damaged: its SHA-256 is not the one in the manifest",
                hint="Copy the whole folder again.",
            )
    return list(expected)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that stands twice would hide the file whose line it replaced."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a name stands twice")
    return dict(pairs)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _discard(path: Path) -> None:
    """Clears what a failed write left behind, without hiding the failure itself."""
    with contextlib.suppress(OSError):
        if path.exists():
            _remove(path)


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None]:
    """Turns the operating system's refusal into a sentence that names the file, and the space when that is the reason."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError, StopIteration):
            existing = next(folder for folder in path.absolute().parents if folder.exists())
            free = f" ({shutil.disk_usage(existing).free / 2**20:.0f} MiB free there)"
        raise FileProblem(
            f"cannot write {path}: {error.strerror or error}{free}", hint="Choose another --out, or make room."
        ) from error
