"""Only regular files are opened, and whatever they hold ends in one kind of error."""

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from vitlab.core.errors import FileProblem
from vitlab.core.reading import open_regular, parse_json, read_bytes, read_json, read_text, require_inside


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
    with pytest.raises(FileProblem, match=f"file is a {kind}"):
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


def test_links_are_followed_inside_a_folder_and_to_the_blobs_of_a_snapshot(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for name, target in {"inside": "file", "blob": blobs / "0af", "outside": tmp_path / "else", "loop": "loop"}.items():
        (folder / name).symlink_to(target)
    for name in ("inside", "blob", "loop"):  # what a loop leads to is found by whoever opens it
        require_inside(folder / name, folder)
    with pytest.raises(FileProblem, match=r"link.*outside"):
        require_inside(folder / "outside", folder)
    with pytest.raises(OSError, match="symbolic links"):
        read_bytes(folder / "loop")


def test_size_is_bounded_before_anything_is_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileProblem, match=r"1,099,511,627,776 bytes.*\b1,000\b"):
        read_bytes(tmp_path / "sparse", limit=1_000)
    (tmp_path / "small").write_bytes(b"x" * 1_000)
    assert read_bytes(tmp_path / "small", limit=1_000) == b"x" * 1_000


def test_limit_costs_no_memory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("{}")
    tracemalloc.start()
    try:
        read_json(tmp_path / "small")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_file_of_holes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x" * 5_000)
        file.truncate(2**40)
    with pytest.raises(FileProblem, match=r"sparse.*1,099,511,627,776 bytes.*[\d,]+ are on disk"):
        open_regular(tmp_path / "sparse")
    with (tmp_path / "zeros").open("wb") as file:  # as a copy with --sparse of weights that are partly zero
        file.write(b"x" * 2**25)
        file.truncate(2**28 + 1)
    with open_regular(tmp_path / "zeros") as file:
        assert file.read(3) == b"xxx"


def test_link_may_lead_anywhere_in_its_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (tmp_path / "outside", folder / "inside"):
        place.write_text("{}")
    (folder / "a").symlink_to("inside")
    (folder / "b").symlink_to("../outside")
    require_inside(folder / "a", folder)
    require_inside(folder / "inside", folder)
    with pytest.raises(FileProblem, match=r"b is a link.*outside"):
        require_inside(folder / "b", folder)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\uDC80": 1}'])
def test_half_a_character_is_not_text(text: str) -> None:
    with pytest.raises(FileProblem, match="surrogates not allowed"):
        parse_json(text, "table.json")


def test_whole_characters_and_repeated_names_are_read_unless_names_must_be_unique() -> None:
    assert parse_json('["\\ud83d\\ude00"]', "x") == ["\U0001f600"]
    assert parse_json('{"a": 1, "a": 2}', "x") == {"a": 2}
    with pytest.raises(FileProblem, match="duplicate key"):
        parse_json('{"a": 1, "a": 2}', "x", unique=True)
