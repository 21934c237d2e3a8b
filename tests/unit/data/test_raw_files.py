"""One table of names over folders, tars, zips and gzips, and readers that find the bytes in all of them."""

import gzip
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vitlab.core import fsio
from vitlab.core.errors import FileProblem
from vitlab.data.sources.raw.files import RecordReader, read_place, scan, stored_plainly

FILES = {"images/cat/1.jpg": b"one" * 50, "images/dog/2.jpg": b"two", "labels/list.txt": b"cat/1\n\ndog/2\n"}


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_bytes(files: dict[str, bytes], method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def lay_out(folder: Path, how: str) -> None:
    if how == "folder":
        for name, data in FILES.items():
            (folder / "around" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "around" / name).write_bytes(data)
        return
    data = {
        "set.tar": tar_bytes(FILES),
        "set.tar.gz": gzip.compress(tar_bytes(FILES)),
        "set.tgz": gzip.compress(tar_bytes(FILES)),
        "plain.tar.gz": tar_bytes(FILES),
        "set.zip": zip_bytes(FILES, zipfile.ZIP_DEFLATED),
        "stored.zip": zip_bytes(FILES, zipfile.ZIP_STORED),
        "outer.zip": zip_bytes({"in/inner.tar.gz": gzip.compress(tar_bytes(FILES))}, zipfile.ZIP_STORED),
    }[how]
    (folder / how).write_bytes(data)


WAYS = ["folder", "set.tar", "set.tar.gz", "set.tgz", "plain.tar.gz", "set.zip", "stored.zip", "outer.zip"]


@pytest.mark.parametrize("how", WAYS)
def test_the_same_names_give_the_same_bytes_however_they_are_packed(tmp_path: Path, how: str) -> None:
    root = tmp_path / "set"
    root.mkdir()
    lay_out(root, how)
    before = sorted(root.rglob("*"))
    files = scan(root, tmp_path / "cache")
    assert [files.read(name) for name in FILES] == list(FILES.values())
    assert files.lines("list.txt") == ["cat/1", "dog/2"]
    assert list(files.below("images")) == ["cat/1.jpg", "dog/2.jpg"]
    dataset = files.part("all", ["cat", "dog"], [("1", "images/cat/1.jpg", 0), ("2", "images/dog/2.jpg", 1)])
    assert pickle.loads(pickle.dumps(dataset)).read(1) == b"two"
    assert sorted(root.rglob("*")) == before, "archives are read, and a set's own folder is left as it was"


def test_tars_in_a_tar_become_folders(tmp_path: Path) -> None:
    inner = {"n01.tar": tar_bytes({"a.JPEG": b"a"}), "n02.tar": tar_bytes({"b.JPEG": b"bb"})}
    (tmp_path / "train.tar").write_bytes(tar_bytes(inner))
    files = scan(tmp_path, tmp_path / ".cache")
    assert files.read("n02/b.JPEG") == b"bb"
    assert files.below("train") == {"n01/a.JPEG": "train/n01/a.JPEG", "n02/b.JPEG": "train/n02/b.JPEG"}


def test_expanding_happens_once_and_again_when_the_archive_is_another(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"first"))
    cache = tmp_path / ".cache"
    with fsio.intercept(lambda operation, path: made.append(path.name) if operation == "rename" else None):
        made: list[str] = []
        assert [scan(tmp_path, cache).read("a") for _ in range(3)] == [b"first"] * 3
        assert made == ["a"]
        (tmp_path / "a.gz").write_bytes(gzip.compress(b"second"))
        assert scan(tmp_path, cache).read("a") == b"second"


def test_names_that_climb_out_are_only_names(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (root / "evil.tar").write_bytes(tar_bytes({"../../evil.jpg": b"x", "/etc/evil.jpg": b"y"}))
    files = scan(root, tmp_path / "cache")
    assert files.read("etc/evil.jpg") == b"y"
    for name in ("../secret.jpg", str(tmp_path / "secret.jpg")):
        with pytest.raises(FileProblem, match="has no"):
            files.read(name)
    assert sorted(path.name for path in tmp_path.rglob("*.jpg")) == ["secret.jpg"]


@pytest.mark.parametrize("how", ["set.tar", "set.tar.gz", "set.zip"])
def test_archives_that_are_cut_or_are_none_are_named(tmp_path: Path, how: str) -> None:
    lay_out(tmp_path, how)
    whole = (tmp_path / how).read_bytes()
    for data in (whole[:700] if how == "set.tar" else whole[:-30], b"nothing of the kind" * 40):
        (tmp_path / how).write_bytes(data)
        with pytest.raises(FileProblem, match=how.replace(".", r"\.").removesuffix(r"\.gz")) as caught:
            for name in FILES:
                scan(tmp_path, tmp_path / ".cache").read(name)
        assert "\n" not in caught.value.what


def test_a_zip_that_changed_since_it_was_read_is_noticed(tmp_path: Path) -> None:
    lay_out(tmp_path, "set.zip")
    files = scan(tmp_path, tmp_path / ".cache")
    place = files.places[files.find("images/cat/1.jpg")]
    data = bytearray((tmp_path / "set.zip").read_bytes())
    data[45:52] = b"\xff" * 7
    (tmp_path / "set.zip").write_bytes(data)
    with pytest.raises(FileProblem, match="damaged"):
        read_place(place)


def test_records_are_cut_from_several_files_and_a_short_one_is_noticed(tmp_path: Path) -> None:
    pixels = np.arange(5 * 3 * 2 * 2, dtype=np.uint8).reshape(5, 3, 2, 2)
    (tmp_path / "a").write_bytes(b"head" + b"".join(b"!" + image.tobytes() for image in pixels[:3]))
    (tmp_path / "b").write_bytes(b"".join(b"!" + image.tobytes() for image in pixels[3:]))
    reader = RecordReader([(tmp_path / "a", 5), (tmp_path / "b", 1)], [0, 3], 13, (3, 2, 2))
    for i, image in enumerate(pixels):
        assert np.array_equal(reader(i), image.transpose(1, 2, 0))
    with pytest.raises(FileProblem, match="b ends too early"):
        reader(5)


def test_a_deflated_member_is_expanded_for_records(tmp_path: Path) -> None:
    lay_out(tmp_path, "set.zip")
    path, start, size = stored_plainly(scan(tmp_path, tmp_path / ".cache"), "images/cat/1.jpg")
    assert path.read_bytes()[start : start + size] == FILES["images/cat/1.jpg"]
