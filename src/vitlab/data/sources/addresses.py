"""Files in object stores and on servers, by address: `s3://bucket/a.tar`, `https://…`. Through fsspec, the extra `remote`."""

import re
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

from vitlab.core.errors import FileProblem, MissingExtra, Unreachable

Answer = TypeVar("Answer")
# fsspec reads each of these through a package of its own: that package, and our extra that brings it.
_STORES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "gcs": ("gcsfs", "gs"),
    "az": ("adlfs", "az"),
    "abfs": ("adlfs", "az"),
    "abfss": ("adlfs", "az"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
}
_PAUSES_S = (0.5, 2.0, 8.0)  # before a read is tried again: stores answer some requests with "slow down"
# File systems that this process has used. A forked process that let go of them would close the connections of its parent, whose
# event loop it shares, and the parent would block forever; so both keep them.
_used: dict[int, Any] = {}
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)  # trying again would not help


def is_remote(address: str) -> bool:
    return re.match(r"[a-z][a-z0-9+]+://", address) is not None


def file_system(address: str) -> Any:
    """fsspec's file system of an address. Created in each process: a forked one must not use its parent's."""
    try:
        import fsspec  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("fsspec", "remote", f"reading {address}") from None
    scheme = address.partition("://")[0]
    try:
        store: Any = fsspec.core.url_to_fs(address)[0]  # pyright: ignore[reportUnknownMemberType]
        return _used.setdefault(id(store), store)
    except ImportError as error:
        if scheme in _STORES:
            raise MissingExtra(*_STORES[scheme], f"reading {address}") from None
        raise FileProblem(
            f"{address} cannot be read: {error}", hint="Install the package that it names, or copy the data."
        ) from None
    except (ValueError, OSError) as error:  # a scheme that fsspec does not know; a store that cannot even be set up
        why = str(error).partition("\n")[0]
        raise FileProblem(f"{address} cannot be read: {why}", hint="Copy the data to a disk of this machine.") from None


def read_address(address: str, start: int | None = None, end: int | None = None) -> bytes:
    """The bytes of a file, or a range of them."""
    store = file_system(address)
    data: bytes = ask_store(address, lambda: store.cat_file(address, start=start, end=end))
    if start is not None and end is not None and len(data) > end - start:
        what = f"{address} cannot be read: its server ignores range requests and sends the whole file"
        raise Unreachable(what, hint="Copy the shards to a disk, or use a server that supports range requests.")
    return data


def ask_store(address: str, ask: Callable[[], Answer]) -> Answer:
    """The answer of a store; transient errors are retried before it counts as unreachable."""
    for pause in (*_PAUSES_S, None):
        try:
            return ask()
        except _FINAL:
            raise
        except Exception as error:  # each store has its own exceptions, few of which are an OSError
            if pause is None:
                what = f"{address} cannot be read: {type(error).__name__} in {len(_PAUSES_S) + 1} attempts"
                raise Unreachable(what, hint="Is the store reachable? The same command resumes.") from error
            time.sleep(pause)
    raise AssertionError


def list_files(address: str, endings: tuple[str, ...]) -> dict[str, str]:
    """The files below an address whose names end so, each with what changes when it does; a pattern, or one file, too."""
    store = file_system(address)

    def ask() -> Mapping[str, Any]:
        if "*" in address:
            return store.glob(address, detail=True)
        if address.lower().endswith(endings):
            return {address: store.info(address)}
        return store.find(address, detail=True)

    try:
        found = ask_store(address, ask)
    except OSError as error:
        raise FileProblem(f"{address} cannot be read: {error.strerror or error}") from None
    return {
        store.unstrip_protocol(name): _version(info)
        for name, info in sorted(found.items())
        if name.lower().endswith(endings)
    }


def _version(info: Mapping[str, Any]) -> str:
    """By the names that stores use; an access time, which some report too, does not count."""
    marks = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation", "LastModified", "last_modified", "mtime")
    known = ("size", *marks, "created")
    if all(info.get(mark) is None for mark in marks):  # another file may be as large
        return ""
    return " ".join(f"{name}={info[name]}" for name in known if info.get(name) is not None)


def version_of(address: str) -> str:
    """What changes with a file, as far as its store tells without sending it."""
    store = file_system(address)
    return _version(ask_store(address, lambda: store.info(address)))


def size_of(address: str) -> int:
    store = file_system(address)
    return ask_store(address, lambda: store.size(address))


def open_address(address: str) -> IO[bytes]:
    """A file to read from front to back."""
    store = file_system(address)
    return ask_store(address, lambda: store.open(address, "rb"))
