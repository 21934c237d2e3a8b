"""Only regular files are opened, and whatever they hold ends in one kind of error."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vitlab.core.errors import FileProblem
from vitlab.core.reading import open_regular, read_bytes, read_json, read_text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("behind"))
    path.symlink_to("behind")


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (fifo, "FIFO"),
        (link_to_fifo, "FIFO"),
        (bound_socket, "socket"),
        (Path.mkdir, "folder"),
        (lambda path: path.symlink_to("/dev/zero"), "device"),
    ],
)
@pytest.mark.parametrize("read", [open_regular, read_bytes, read_text, read_json])
def test_only_regular_files_are_opened(
    tmp_path: Path, make: Callable[[Path], None], kind: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(FileProblem, match=f"file is a {kind}, not a regular file"):
        read(path)


def test_absent_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


def test_text_has_plain_line_ends_and_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'["a",\r\n"\xc3\xa9"]\r')
    assert read_text(tmp_path / "file") == '["a",\n"é"]\n'
    assert read_json(tmp_path / "file") == ["a", "é"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5_000, json.dumps({"a": "\ud800"}).encode()[:-3]],
    ids=["empty", "open", "not text", "deep", "huge number", "cut off"],
)
def test_json_that_cannot_be_read_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table.json").write_bytes(content)
    with pytest.raises(FileProblem, match=r"table\.json"):
        read_json(tmp_path / "table.json")


def test_size_is_bounded_before_anything_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileProblem, match="1,099,511,627,776 bytes; at most 1,000"):
        read_bytes(tmp_path / "sparse", limit=1_000)
    (tmp_path / "small").write_bytes(b"x" * 1_000)
    assert read_bytes(tmp_path / "small", limit=1_000) == b"x" * 1_000
