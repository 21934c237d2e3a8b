"""Tar shards: what WebDataset wrote is read, what we write is whole, resumable and the same every time."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core import fsio
from vitlab.core.errors import FileProblem
from vitlab.data.dataset import Opened, from_arrays
from vitlab.data.shards import open_shards, scan_shard, verify_shards, write_shards

PIXELS = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def opened() -> Opened:
    data = from_arrays(PIXELS, [0, 1, 2, 0, 1, 2, 0], ["ant", "bee", "cat"])
    return Opened({"train": data.subset(torch.arange(5)), "test": data.subset(torch.tensor([5, 6]))})


def write(out: Path, per_shard: int = 2) -> dict[str, Any]:
    return write_shards(opened(), out, per_shard=per_shard, workers=1, advance=lambda *_: None)


def test_webdataset_files_of_others_are_read(tmp_path: Path) -> None:
    tar(
        tmp_path / "data-0.tar",
        {"a.jpg": b"A", "a.cls": b"10", "b.png": b"BB", "b.cls": b"9\n", "x/a.jpg": b"C", "x/a.cls": b"9"},
    )
    data = open_shards(tmp_path).parts["all"]
    assert data.classes == ("9", "10"), "numbers in the order of numbers"
    assert data.keys == ["a", "b", "x/a"]
    assert [data.read(i) for i in range(3)] == [b"A", b"BB", b"C"]
    assert data.labels.single().tolist() == [1, 0, 0]


def test_several_labels_and_words_in_json(tmp_path: Path) -> None:
    files = {"a.jpg": b"A", "a.json": b'{"labels": ["x", "y"]}', "b.jpg": b"B", "b.json": b'{"label": "y"}'}
    data = open_shards(tar(tmp_path / "one.tar", files)).parts["all"]
    assert data.labels.multi
    assert [data.labels[i] for i in range(2)] == [(0, 1), (1,)]


def test_written_shards_hold_every_image_under_its_name_and_label(tmp_path: Path) -> None:
    write(tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["index.json", "test-00000.tar", "train-00000.tar", "train-00001.tar", "train-00002.tar"]
    again, source = open_shards(tmp_path / "out"), opened()
    for part, data in source.parts.items():
        assert again.parts[part].classes == data.classes
        assert again.parts[part].keys == list(data.keys)
        for i in range(len(data)):
            assert again.parts[part].labels[i] == data.labels[i]
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(again.parts[part].read(i)))), data.read(i))
    assert len(verify_shards(tmp_path / "out")) == 4


def test_without_the_index_the_same_images_are_found(tmp_path: Path) -> None:
    write(tmp_path / "out")
    indexed = open_shards(tmp_path / "out")
    (tmp_path / "out" / "index.json").unlink()
    scanned = open_shards(tmp_path / "out")
    for part in indexed.parts:
        assert [indexed.parts[part].read(i) for i in range(2)] == [scanned.parts[part].read(i) for i in range(2)]


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a") == write(tmp_path / "b")


def test_an_interrupted_call_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole")
    out = tmp_path / "out"
    write(out)
    # As an interruption leaves it: notes of finished shards, no index, one shard cut short.
    (out / "index.json").unlink()
    for name, told in whole.items():
        part, number = name.removesuffix(".tar").split("-")
        first = int(number) * 2
        data = opened().parts[part]
        from vitlab.data.shards import _made_from

        made = _made_from(data, range(first, min(first + 2, len(data))))
        (out / f".{name}.json").write_text(json.dumps({**told, "made_from": made}))
    (out / "train-00001.tar").write_bytes(b"cut short")
    kept = (out / "train-00000.tar").stat().st_mtime_ns
    assert write(out) == whole
    assert (out / "train-00000.tar").stat().st_mtime_ns == kept
    assert verify_shards(out) == whole


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"a.jpg": b"A"}, "'a' has no label"),
        ({"a.cls": b"1"}, "'a' has a label, but no image"),
        ({"a.jpg": b"A", "a.json": b"{"}, "is no label"),
        ({"a.jpg": b"A", "a.json": b'{"other": 1}'}, "is no label"),
        ({"a.jpg": b"A", "a.cls": b"\xff"}, "is no label"),
        ({"a.jpg": b"A", "a.cls": b"1" * 1_000_001}, "has 1,000,001 bytes"),
    ],
)
def test_every_damage_gets_a_sentence(tmp_path: Path, files: dict[str, bytes], what: str) -> None:
    with pytest.raises(FileProblem, match=what):
        scan_shard(str(tar(tmp_path / "bad.tar", files)))


def test_files_that_are_no_tar(tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(FileProblem, match="no readable tar"):
        open_shards(tmp_path / "bad.tar")
    with pytest.raises(FileProblem, match=r"holds no \.tar"):
        open_shards(tmp_path / "nothing")
    write(tmp_path / "out")
    fsio.write_file(tmp_path / "out" / "index.json", "{")
    with pytest.raises(FileProblem, match="no readable index"):
        open_shards(tmp_path / "out")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out")
    path = tmp_path / "out" / "train-00001.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(FileProblem, match=r"train-00001\.tar is damaged"):
        verify_shards(tmp_path / "out")


def test_addresses_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    write(tmp_path / "out")
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "out").iterdir():
        memory.pipe(f"/shards/{path.name}", path.read_bytes())
    local, remote = open_shards(tmp_path / "out"), open_shards("memory://shards")
    assert remote.parts["test"].read(1) == local.parts["test"].read(1)
    memory.rm("/shards/index.json")
    assert open_shards("memory://shards").parts["test"].read(1) == local.parts["test"].read(1)
