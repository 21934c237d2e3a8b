"""Untrusted tar archives, read header by header.

Owns the checks of a header. Python's `tarfile` trusts any size in one: it would allocate that much memory, or loop forever on a
negative size.
"""

import tarfile
from collections.abc import Iterator
from typing import IO, cast

from vitlab.core.errors import FileProblem

# Of a long name or an extended header, which may hold ACLs. Python before 3.11.10 takes seconds for one full of digits.
_HEADER_BYTES = 2**16


def tar_members(file: IO[bytes], name: str, start: int = 0, size: int | None = None) -> Iterator[tarfile.TarInfo]:
    """The regular files in a tar, each with its place: `offset_data` and `size`.

    The tar is all of `file`, or `size` bytes of it from `start` on, from where offsets count. Errors call it `name`.
    """
    bounded = _Bounded(file, name, start, size)
    try:
        with tarfile.open(fileobj=cast(IO[bytes], bounded), mode="r:") as archive:
            while (member := archive.next()) is not None:
                # They take a kilobyte each, and are not used again.
                archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                if member.size < 0 or member.offset_data + member.size > bounded.size:
                    raise FileProblem(f"{name} is damaged: {member.name!r:.60} reaches beyond its end")
                if member.issparse():
                    raise FileProblem(
                        f"{name} holds the sparse file {member.name!r:.60}", hint="Pack it without --sparse."
                    )
                if member.isfile():
                    yield member
    except FileProblem:
        raise
    except OSError as error:
        raise FileProblem(f"{name} cannot be read: {error.strerror or error}") from None
    except Exception:  # on damaged headers tarfile lets a dozen types out
        raise FileProblem(f"{name} is not a readable tar: it is damaged or cut short") from None


class _Bounded:
    """What `tarfile` sees: the tar's bytes, never more at a time than a header has."""

    def __init__(self, file: IO[bytes], name: str, start: int, size: int | None) -> None:
        self._file, self._name, self._start, self._at = file, name, start, 0
        self.size = file.seek(0, 2) - start if size is None else size

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> int:
        self._at = at
        return at

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise FileProblem(f"{self._name} is damaged: it has a header of {size:,} bytes")
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(size, self.size - self._at)))
        self._at += len(data)
        return data
