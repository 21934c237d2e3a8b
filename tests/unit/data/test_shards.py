"""Tar shards: what WebDataset wrote is read, what we write is whole, resumable and the same every time."""

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, MissingExtra, UsageError
from vitlab.data.dataset import Opened, from_arrays, several_labels
from vitlab.data.sources import addresses
from vitlab.data.sources.folders import open_folder
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.shard_writing import write_shards
from vitlab.data.sources.shards import open_shards, scan_shard
from vitlab.data.synthetic.names import open_synthetic

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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
    assert names == [
        ".lock",
        "SHA256SUMS",
        "index.json",
        "test-00000.tar",
        "train-00000.tar",
        "train-00001.tar",
        "train-00002.tar",
    ]
    again, source = open_shards(tmp_path / "out"), opened()
    for part, data in source.parts.items():
        assert again.parts[part].classes == data.classes
        assert again.parts[part].keys == list(data.keys)
        for i in range(len(data)):
            assert again.parts[part].labels[i] == data.labels[i]
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(again.parts[part].read(i)))), data.read(i))
    reported = json.loads((tmp_path / "out" / "index.json").read_bytes())["shards"]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").glob("*.tar")}
    assert {name: shard["sha256"] for name, shard in reported.items()} == found
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_without_the_index_the_same_images_are_found(tmp_path: Path) -> None:
    write(tmp_path / "out")
    indexed = open_shards(tmp_path / "out")
    (tmp_path / "out" / "index.json").unlink()
    (tmp_path / "out" / "SHA256SUMS").unlink()
    scanned = open_shards(tmp_path / "out")
    for part in indexed.parts:
        assert [indexed.parts[part].read(i) for i in range(2)] == [scanned.parts[part].read(i) for i in range(2)]


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a") == write(tmp_path / "b")


def test_several_processes_write_what_one_does(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write_shards(opened(), tmp_path / "two", per_shard=2, workers=2, advance=lambda *_: None)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_an_interrupted_call_resumes_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = write(out)
    expected = contents(out)
    (out / "SHA256SUMS").unlink()
    (out / "index.json").unlink()  # as an interruption leaves it: notes of shards, one cut short, one not there yet
    for name, reported in whole.items():
        (out / f".{name}.json").write_text(json.dumps(reported))
    (out / "train-00001.tar").write_bytes(b"cut short")
    (out / "train-00002.tar").unlink()
    (out / ".train-00002.tar.json").unlink()
    kept = (out / "train-00000.tar").stat().st_mtime_ns
    assert write(out) == whole
    assert (out / "train-00000.tar").stat().st_mtime_ns == kept
    assert contents(out) == expected
    assert write(out) == whole, "a call too many changes nothing"
    assert contents(out) == expected and (out / "train-00000.tar").stat().st_mtime_ns == kept


def test_other_data_and_other_files_in_the_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "out")
    expected = contents(tmp_path / "out")
    data = opened().parts["train"]
    changed = {"train": data.subset(torch.tensor([0, 1, 2, 3])), "test": opened().parts["test"]}
    with pytest.raises(UsageError, match=r"train-00002\.tar.*not a part of these shards"):
        write_shards(Opened(changed), tmp_path / "out", per_shard=2, workers=1, advance=lambda *_: None)
    with pytest.raises(UsageError, match="is not a part of these shards"):
        write(tmp_path / "out", per_shard=3)
    assert contents(tmp_path / "out") == expected
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train-00000.tar").write_bytes(b"somebody's")
    with pytest.raises(UsageError, match="is not a part of these shards"):
        write(tmp_path / "mine")
    assert (tmp_path / "mine" / "train-00000.tar").read_bytes() == b"somebody's"


def test_the_same_names_drawn_at_another_size_are_other_data(tmp_path: Path) -> None:
    for size in (16, 32):
        made = open_synthetic(f"fractals:categories=2,image_size={size}")
        if size == 16:
            write_shards(made, tmp_path / "out", per_shard=2, workers=1, advance=lambda *_: None)
    with pytest.raises(UsageError, match="is not a part of these shards"):
        write_shards(made, tmp_path / "out", per_shard=2, workers=1, advance=lambda *_: None)


def test_classes_keep_their_order_and_those_without_images_stay(tmp_path: Path) -> None:
    """D14: arrays may have 10 before 9; shards of them must mean the same by class 0."""
    data = from_arrays(PIXELS[:2], [0, 1], ["10", "9", "nothing"])
    write_shards(Opened({"all": data}), tmp_path / "out", per_shard=9, workers=1, advance=lambda *_: None)
    again = open_shards(tmp_path / "out").parts["all"]
    assert (again.classes, again.labels.single().tolist()) == (("10", "9", "nothing"), [0, 1])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_not_an_image_stops_the_work_and_the_next_call_goes_on(tmp_path: Path, workers: int) -> None:
    for i in range(6):
        path = tmp_path / "data" / "cat" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path)
    path.write_bytes(b"no image")

    def shard() -> dict[str, Any]:
        source = open_folder(tmp_path / "data")
        return write_shards(source, tmp_path / "out", per_shard=2, workers=workers, advance=lambda *_: None)

    with pytest.raises(FileProblem, match=r"cat/5\.png is not an image"):
        shard()
    assert not (tmp_path / "out" / "index.json").exists()
    path.unlink()
    assert len(shard()) == 3
    path = tmp_path / "data" / "cat" / "4.png"
    source = open_folder(tmp_path / "data")
    path.unlink()
    with pytest.raises(FileProblem, match=r"cat/4\.png cannot be read: No such file"):
        write_shards(source, tmp_path / "other", per_shard=9, workers=workers, advance=lambda *_: None)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"a.jpg": b"A"}, "'a' has no label"),
        ({"a.cls": b"1"}, "'a' has a label, but no image"),
        ({"a.jpg": b"A", "a.json": b"{"}, "is not a label"),
        ({"a.jpg": b"A", "a.json": b'{"other": 1}'}, "is not a label"),
        ({"a.jpg": b"A", "a.cls": b"\xff"}, "is not a label"),
        ({"a.jpg": b"A", "a.cls": b" "}, "is not a label: it is empty"),
        ({"a.jpg": b"A", "a.cls": b"1" * 1_000_001}, "has 1,000,001 bytes"),
    ],
)
def test_every_damage_gets_a_sentence(tmp_path: Path, files: dict[str, bytes], what: str) -> None:
    with pytest.raises(FileProblem, match=what):
        scan_shard(str(tar(tmp_path / "bad.tar", files)))


def test_files_that_are_not_tar(tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(FileProblem, match="not a readable tar"):
        open_shards(tmp_path / "bad.tar")
    with pytest.raises(FileProblem, match=r"holds no \.tar"):
        open_shards(tmp_path / "nothing")
    write(tmp_path / "out")
    (tmp_path / "out" / "SHA256SUMS").unlink()
    fsio.write_file(tmp_path / "out" / "index.json", "{")
    with pytest.raises(FileProblem, match="not a readable index"):
        open_shards(tmp_path / "out")


def with_header(data: bytes, at: int, field: int, value: bytes, kind: bytes = b"0") -> bytes:
    """The tar with one field of the header at `at` changed, and a checksum that fits."""
    header = bytearray(data[at : at + 512])
    header[field : field + len(value)] = value
    header[156:157], header[148:156] = kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


@pytest.mark.parametrize("kind", [b"0", b"x", b"g", b"L", b"K", b"S", b"A"])
@pytest.mark.parametrize("size", [2**40, 2**62, 2**80, -1, -512, -1024], ids=str)
def test_sizes_that_only_a_header_claims_cost_neither_memory_nor_time(tmp_path: Path, kind: bytes, size: int) -> None:
    path = tar(tmp_path / "one.tar", {"a.png": b"A" * 600, "a.cls": b"1", "b.png": b"B", "b.cls": b"0"})
    number = (b"\x80" if size > 0 else b"\xff") + (size % 256**11).to_bytes(11, "big")  # base 256, as GNU writes it
    path.write_bytes(with_header(path.read_bytes(), 0, 124, number, kind))
    tracemalloc.start()
    try:
        with pytest.raises(FileProblem, match=r"one\.tar"):
            scan_shard(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "row",
    [
        *(None, 3, [], {}, "abcde", ["k", 512, 10, ["ant"], 1, "g", "h"], [3, 512, 10, ["ant"], None]),
        *(["k", at, 10, ["ant"], None] for at in (None, -1, 1.5, "5", True, [1], 10**6, 10**30)),
        *(["k", 512, size, ["ant"], None] for size in (None, -1, 2**63, 10**400)),
        *(["k", 512, 10, labels, None] for labels in (None, "ant", 3, [3], [None], [["ant"]], ["\ud800"])),
        *(["k", 512, 10, ["ant"], crc] for crc in ("0", -1, 2**32, 1.5, [])),
        *(["\ud800", 512, 10, ["ant"], None], ["k", 512, 10, ["ant"], None, 3]),
    ],
    ids=lambda row: str(row)[:30].encode("ascii", "replace").decode(),
)
def test_entry_of_an_index_is_believed_only_where_it_can_be_true(tmp_path: Path, row: Any) -> None:
    write(tmp_path / "out", per_shard=9)
    path = tmp_path / "out" / "index.json"
    table = json.loads(path.read_bytes())
    table["shards"]["train-00000.tar"]["entries"][0] = row
    path.write_text(json.dumps(table))
    (tmp_path / "out" / "SHA256SUMS").unlink()
    with pytest.raises(FileProblem, match=r"index\.json is not a readable index"):
        open_shards(tmp_path / "out")


@pytest.mark.parametrize("label", ['"\\ud800"', "[[1]]", '{"label": {}}', "[" * 100_000, "9" * 5_000])
def test_label_of_json_that_is_none_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(FileProblem, match="is not a label"):
        scan_shard(str(tar(tmp_path / "one.tar", {"a.png": b"A", "a.json": label.encode()})))


def test_d20_a_missing_or_shortened_shard_is_named_when_the_set_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "out")
    path = tmp_path / "out" / "train-00001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FileProblem, match=r"train-00001\.tar is damaged.*10,239 bytes.*10,240"):
        open_shards(tmp_path / "out")
    path.unlink()
    with pytest.raises(FileProblem, match=r"lacks train-00001\.tar, which is in its index"):
        open_shards(tmp_path / "out")


def test_d20_with_any_byte_changed_an_image_is_the_same_or_refused_and_no_label_moves(tmp_path: Path) -> None:
    write(tmp_path / "out")
    path = tmp_path / "out" / "train-00000.tar"
    data = open_shards(tmp_path / "out").parts["train"]
    expected = [data.read(i) for i in range(len(data))]
    whole, refused = path.read_bytes(), 0
    with path.open("r+b", buffering=0) as file:
        for at in range(len(whole)):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 0x55]), at)
            for i in range(2):  # the images of this shard
                try:
                    assert data.read(i) == expected[i]
                except FileProblem as error:
                    refused += 1
                    assert re.search(r"train-00000\.tar is damaged at byte [\d,]+", error.what)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert refused == len(expected[0]) + len(expected[1])
    assert open_shards(tmp_path / "out").parts["train"].labels.single().tolist() == data.labels.single().tolist()


def test_d20_an_index_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", per_shard=9)
    path = tmp_path / "out" / "index.json"
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in range(len(whole)):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1]), at)
            with pytest.raises(FileProblem, match=r"index\.json is damaged"):
                open_shards(tmp_path / "out")
            os.pwrite(file.fileno(), whole[at : at + 1], at)


def test_d20_a_shard_of_others_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "one.tar", {"a.jpg": b"A" * 600, "a.cls": b"1"})
    data = open_shards(path).parts["all"]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FileProblem, match=r"one\.tar is damaged at byte 512"):
        data.read(0)


def test_addresses_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    write(tmp_path / "out")
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "out").iterdir():
        memory.pipe(f"/shards/{path.name}", path.read_bytes())
    local, remote = open_shards(tmp_path / "out"), open_shards("memory://shards")
    assert remote.parts["test"].read(1) == local.parts["test"].read(1)
    memory.pipe("/shards/test-00000.tar", b"short")
    with pytest.raises(FileProblem, match=r"test-00000\.tar is damaged: it has 5 bytes"):
        open_shards("memory://shards")
    memory.pipe("/shards/test-00000.tar", (tmp_path / "out" / "test-00000.tar").read_bytes())
    memory.rm("/shards/index.json")
    assert open_shards("memory://shards").parts["test"].read(1) == local.parts["test"].read(1)


def test_parts_are_found_anywhere_in_the_name(tmp_path: Path) -> None:
    for name in ("imagenet1k-train-0000.tar", "imagenet1k-Validation-00.tar"):
        tar(tmp_path / name, {"a.jpg": b"A", "a.cls": b"1"})
    assert list(open_shards(tmp_path).parts) == ["train", "val"]
    tar(tmp_path / "contest-latest.tar", {"a.jpg": b"A", "a.cls": b"1"})
    with pytest.raises(
        FileProblem, match=r"such as imagenet1k-Validation-00\.tar, with others, such as contest-latest\.tar"
    ):
        open_shards(tmp_path)


def test_the_label_is_the_best_of_several_files(tmp_path: Path) -> None:
    best = {"a.txt": b"a caption", "a.json": b'{"size": 3}', "a.jpg": b"A", "a.cls": b"1"}
    good = {"b.txt": b"a caption", "b.jpg": b"B", "b.json": b'{"label": 2, "group": 7}'}
    data = open_shards(tar(tmp_path / "one.tar", best | good)).parts["all"]
    assert (data.classes, data.groups) == (("1", "2"), ["", "7"])


def test_one_key_with_two_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="'a' has two images"):
        scan_shard(str(tar(tmp_path / "two.tar", {"a.jpg": b"A", "a.png": b"B", "a.cls": b"1"})))


def test_several_labels_and_groups_come_back_in_every_part(tmp_path: Path) -> None:
    data = from_arrays(PIXELS[:3], [0, 1, 1], ["ant", "bee"])
    data = dataclasses.replace(data, labels=several_labels([[0, 1], [0], [1]]), groups=["p", "", "q"])
    parts = {"train": data.subset(torch.tensor([0, 1])), "test": data.subset(torch.tensor([2]))}
    write_shards(Opened(parts), tmp_path / "out", per_shard=2, workers=1, advance=lambda *_: None)
    for again in (open_shards(tmp_path / "out"), open_shards(tmp_path / "out" / "test-00000.tar")):
        assert again.parts["test"].groups == ["q"]
        assert again.parts["test"].labels[0] == (1,)
    again = open_shards(tmp_path / "out")
    assert all(part.labels.multi for part in again.parts.values())
    assert again.parts["train"].groups == ["p", ""]


def test_a_changed_file_and_other_classes_are_other_data(tmp_path: Path) -> None:
    for i in range(2):
        path = tmp_path / "data" / "cat" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, 0, 0)).save(path)

    def shard(source: Opened) -> None:
        write_shards(source, tmp_path / "out", per_shard=2, workers=1, advance=lambda *_: None)

    shard(open_folder(tmp_path / "data"))
    shard(open_folder(tmp_path / "data"))
    (tmp_path / "data" / "cat").rename(tmp_path / "data" / "dog")
    (tmp_path / "out").rename(tmp_path / "first")
    shard(open_folder(tmp_path / "data"))
    Image.new("RGB", (4, 4), (200, 0, 0)).save(tmp_path / "data" / "dog" / "1.png")
    with pytest.raises(UsageError, match="is not a part of these shards"):
        shard(open_folder(tmp_path / "data"))
    data = from_arrays(PIXELS[:2], [0, 1], ["ant", "bee"])
    for classes in (("ant", "bee"), ("bee", "ant")):
        renamed = Opened({"all": dataclasses.replace(data, classes=classes)})
        with pytest.raises(UsageError, match="is not a part of these shards") if classes[0] == "bee" else nullcontext():
            write_shards(renamed, tmp_path / "arrays", per_shard=2, workers=1, advance=lambda *_: None)


@pytest.mark.parametrize(
    ("address", "package", "extra"),
    [("s3://bucket/shards", "s3fs", "s3"), ("gs://bucket/a.tar", "gcsfs", "gs"), ("az://box/a.tar", "adlfs", "az")],
)
def test_an_address_whose_package_is_missing_names_the_install_line(
    address: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    monkeypatch.setitem(sys.modules, package, None)  # as on a machine without it
    with pytest.raises(MissingExtra, match=f"(?s){package}.*pip install 'vitlab\\[{extra}\\]'"):
        open_data(address)


def test_every_extra_of_an_address_is_declared_and_brings_its_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for package, extra in addresses._STORES.values():
        assert any(each.startswith(package) for each in project["optional-dependencies"][extra])


def test_an_address_of_an_unknown_kind_is_not_a_fault() -> None:
    pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    with pytest.raises(FileProblem, match="cannot be read: Protocol not known"):
        open_data("zzz://bucket/a.tar")
