"""Every plant in a folder is found and said in words; a clean folder raises nothing; no file can end the work."""

import dataclasses
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from slow_cases import slow_after

from vitlab.data.auditing.audit import Audit, Finding, audit
from vitlab.data.dataset import Dataset, Opened, from_arrays, several_labels, single_labels
from vitlab.data.sources.folders import open_folder
from vitlab.data.sources.packed import open_packed
from vitlab.data.sources.tables import open_table

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))


def picture(seed: int, side: int = 64) -> Image.Image:
    """Smooth blobs of colour with some grain: as different from each other as photos."""
    draw = np.random.default_rng(seed)
    blobs = Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    grain = draw.integers(-9, 10, (side, side, 3))
    return Image.fromarray((np.asarray(blobs).astype(int) + grain).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG whose header promises `side` squared pixels, with none behind it."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    signed = [struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(signed)


def clean(root: Path) -> Path:
    for number, part in enumerate(("train", "val")):
        for label, name in enumerate(("ants", "bees")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(12 if part == "train" else 4):
                (folder / f"{i}.jpg").write_bytes(encoded(picture(1000 * number + 100 * label + i)))
    return root


def planted(root: Path) -> dict[str, bytes]:
    """What is wrong in each file, by where it lies."""
    whole, lossless = encoded(picture(40)), encoded(picture(41), "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray((np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64))
    return {
        "train/ants/broken.png": lossless[:2000] + bytes(40) + lossless[2040:],
        "train/ants/truncated.jpg": whole[: len(whole) // 2],
        "train/ants/empty.jpg": b"",
        "train/ants/text.jpg": b"not a picture at all",
        "train/ants/bomb.png": bomb(7000),
        "train/ants/vast.png": bomb(60000),
        "train/bees/moving.gif": encoded(picture(50), "GIF", save_all=True, append_images=[picture(51)]),
        "train/bees/print.jpg": encoded(picture(52).convert("CMYK")),
        "train/bees/deep.png": encoded(deep, "PNG"),
        "train/bees/turned.jpg": encoded(picture(53), exif=exif),
        "train/bees/dot.png": encoded(picture(54, 1), "PNG"),
        "train/bees/really.png": encoded(picture(55)),
        "val/ants/copy.jpg": encoded(picture(1)),
        "val/ants/smaller.jpg": encoded(picture(2).resize((40, 40), Image.Resampling.LANCZOS), quality=60),
        "val/ants/mirror.jpg": encoded(ImageOps.mirror(picture(3))),
        "train/bees/also_an_ant.png": encoded(picture(4), "PNG"),
        "train/ants/twice.webp": encoded(picture(5), "WEBP"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    root = clean(tmp_path_factory.mktemp("planted"))
    for name, content in planted(root).items():
        (root / name).write_bytes(content)
    for i in range(3):
        (root / "train" / "wasps").mkdir(exist_ok=True)
        (root / "train" / "wasps" / f"{i}.png").write_bytes(encoded(picture(300 + i), "PNG"))
    (root / "train" / "bees" / "wo\nrld.jpg").write_bytes(encoded(picture(60)))
    return audit(open_folder(root), workers=2)


def keys(finding: Finding) -> list[str]:
    return [item.key for item in finding.items]


def of_kind(found: Audit, kind: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kind]


UNREADABLE = {
    "broken": "damaged or cut short",
    "truncated": "damaged or cut short",
    "empty": "is empty",
    "text": "is not an image of an accepted format",
    "bomb": "has 7,000x7,000 pixels; the limit is 40,000,000; VITLAB_MAX_PIXELS sets another",
    "vast": "has too many pixels; the limit is 40,000,000; VITLAB_MAX_PIXELS sets another",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unusable_file_is_named_with_its_reason(found: Audit, name: str) -> None:
    (finding,) = [finding for finding in of_kind(found, "unreadable") if name in keys(finding)[0]]
    assert UNREADABLE[name] in finding.text
    assert finding.serious


def test_nothing_else_is_called_unusable(found: Audit) -> None:
    assert len(of_kind(found, "unreadable")) == len(UNREADABLE)


ODD = [
    ("animated", "moving.gif"),
    ("cmyk", "print.jpg"),
    ("16-bit", "deep.png"),
    ("rotated", "turned.jpg"),
    ("tiny", "dot.png"),
]


@pytest.mark.parametrize(("kind", "name"), ODD)
def test_odd_file_is_named(found: Audit, kind: str, name: str) -> None:
    (finding,) = of_kind(found, kind)
    assert keys(finding) == [f"train/bees/{name}"]
    assert not finding.serious


LEAKS = {
    "copy.jpg": ("train/ants/1.jpg", "the same file in train and val"),
    "smaller.jpg": ("train/ants/2.jpg", "the same picture in train and val"),
    "mirror.jpg": ("train/ants/3.jpg", "the same picture, mirrored, in train and val"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_leak_between_parts_is_found(found: Audit, name: str) -> None:
    first, text = LEAKS[name]
    assert [finding.text for finding in of_kind(found, "leak") if keys(finding) == [first, f"val/ants/{name}"]] == [
        text
    ]


def test_no_other_leak_is_claimed(found: Audit) -> None:
    assert len(of_kind(found, "leak")) == len(LEAKS)


def test_contradiction_and_duplicate_are_distinguished(found: Audit) -> None:
    (contradiction,), (duplicate,) = of_kind(found, "contradiction"), of_kind(found, "duplicate")
    assert keys(contradiction) == ["train/ants/4.jpg", "train/bees/also_an_ant.png"]
    assert contradiction.text == "the same picture as ants and bees"
    assert keys(duplicate) == ["train/ants/5.jpg", "train/ants/twice.webp"]


def test_classes_that_differ_are_named(found: Audit) -> None:
    assert "val has no image of wasps" in [finding.text for finding in of_kind(found, "class")]


def test_names_are_checked(found: Audit) -> None:
    assert ["train/bees/really.png"] in [keys(finding) for finding in of_kind(found, "name")]
    assert any("a name that is not text" in note for note in found.notes)


def test_jpeg_with_wrong_data_inside_is_found_though_it_decodes(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    (tmp_path / "a").mkdir()
    whole = encoded(picture(0, 200))
    (tmp_path / "a" / "rotten.jpg").write_bytes(whole[:2000] + bytes(range(200)) + whole[2200:])
    (tmp_path / "a" / "whole.jpg").write_bytes(whole)
    (finding,) = of_kind(audit(open_folder(tmp_path), workers=1), "damaged")
    assert (keys(finding), finding.serious) == (["a/rotten.jpg"], True)


def test_clean_folder_raises_nothing(tmp_path: Path) -> None:
    found = audit(open_folder(clean(tmp_path)), workers=2)
    assert found.findings == ()
    assert not found.serious
    assert found.sizes == {"train": 24, "val": 8}
    assert found.formats == {"JPEG": 32}


@pytest.mark.slow
def test_real_photos_raise_nothing() -> None:
    archives = {name: DATA / "hymenoptera" / f"hymenoptera_{name}.npz" for name in ("train", "val")}
    if not archives["train"].exists():
        pytest.skip("no hymenoptera photos in VITLAB_DATA")
    assert audit(open_packed(archives), workers=2).findings == ()


def test_result_does_not_depend_on_workers(tmp_path: Path, found: Audit) -> None:
    root = clean(tmp_path)
    (root / "val/ants/copy.jpg").write_bytes((root / "train/ants/1.jpg").read_bytes())
    assert audit(open_folder(root), workers=1) == audit(open_folder(root), workers=3)


@pytest.mark.slow
def test_every_one_of_many_damaged_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(240):
        raw = encoded(picture(i, 24), ("JPEG", "PNG", "WEBP")[i % 3])
        damaged = (raw[: len(raw) // 2], b"", b"<html>", bytes(16) + raw[16:])[i // 2 % 4]
        (tmp_path / "a" / f"{i}.jpg").write_bytes(damaged if i % 2 else raw)
    named = {keys(finding)[0] for finding in of_kind(audit(open_folder(tmp_path), workers=2), "unreadable")}
    assert named == {f"a/{i}.jpg" for i in range(1, 240, 2)}


# --- hostile circumstances --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trap:
    """Reads images, and does `harm` at some of them."""

    harm: Callable[[], None]
    at: tuple[int, ...]

    def __call__(self, i: int) -> bytes:
        if i in self.at:
            self.harm()
        return encoded(picture(i))


def die() -> None:
    os._exit(11)  # as a decoder does that writes where it must not


def refuse() -> None:
    raise PermissionError(13, "Permission denied")


def vanish() -> None:
    raise FileNotFoundError(2, "No such file or directory")


def point_at_a_folder() -> None:
    raise IsADirectoryError(21, "Is a directory")


def misbehave() -> None:
    raise RuntimeError("0xdeadbeef")


HARMS = {
    die: "crash",
    refuse: "no permission",
    vanish: "no longer exists",
    point_at_a_folder: "a folder",
    misbehave: "RuntimeError",
}


@pytest.mark.parametrize("harm", slow_after(1, HARMS), ids=lambda harm: harm.__name__)
def test_harm_costs_the_image_that_did_it_and_no_other(harm: Callable[[], None]) -> None:
    at = (3, 66)
    labels = single_labels([0] * 70)
    dataset = Dataset("trap", ("a",), [f"{i}.jpg" for i in range(70)], labels, Trap(harm, at))
    found = audit(Opened({"all": dataset}), workers=2)
    assert [finding.items[0].index for finding in of_kind(found, "unreadable")] == list(at)
    assert {HARMS[harm] in finding.text for finding in of_kind(found, "unreadable")} == {True}
    assert [finding for finding in found.findings if finding.kind != "unreadable"] == []


# --- what is not the same picture -------------------------------------------------------------------------------------


def test_empty_pictures_are_not_all_the_same() -> None:
    flat = np.stack([np.full((3, 32, 32), level, dtype=np.uint8) for level in range(0, 250, 5)])
    found = audit(Opened({"all": from_arrays(flat, [0] * len(flat), ["sky"])}), workers=1)
    assert found.counts == {}


def test_same_shape_in_another_colour_is_another_picture() -> None:
    shape = np.zeros((3, 32, 32), np.uint8)
    shape[:, 8:20, 5:28] = 1
    colours = np.array([[200, 30, 30], [30, 110, 30]], np.uint8)  # equally bright, red and green
    found = audit(Opened({"all": from_arrays(shape * colours[:, :, None, None], [0, 1], ["a", "b"])}), workers=1)
    assert "contradiction" not in found.counts


def test_equal_pixels_of_another_shape_are_another_picture() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 24, 6), dtype=np.uint8)
    tall = Opened(
        {"train": from_arrays(pixels, [0], ["a"]), "val": from_arrays(pixels.reshape(1, 3, 6, 24), [0], ["a"])}
    )
    assert "leak" not in audit(tall, workers=1).counts


# --- other data, groups, several labels -------------------------------------------------------------------------------


def arrays(*seeds: int, label: int = 0) -> Dataset:
    images = np.stack([np.asarray(picture(seed)).transpose(2, 0, 1) for seed in seeds])
    return from_arrays(images, [label] * len(seeds), ["a", "b"])


def test_pictures_of_another_set_are_found_and_its_own_copies_are_not_our_business() -> None:
    found = audit(Opened({"train": arrays(1, 2, 3)}), against={"other": arrays(9, 3, 8, 8)}, workers=1)
    (leak,) = of_kind(found, "leak")
    assert [(item.part, item.index) for item in leak.items] == [("train", 2), ("other", 1)]
    assert "duplicate" not in found.counts


def test_group_in_two_parts_is_a_leak(tmp_path: Path) -> None:
    rows = ["path,label,split,group"]
    for i, (split, group) in enumerate([("train", "p1"), ("train", "p2"), ("val", "p2"), ("val", "p3")]):
        (tmp_path / f"{i}.png").write_bytes(encoded(picture(i), "PNG"))
        rows.append(f"{i}.png,a,{split},{group}")
    (tmp_path / "all.csv").write_text("\n".join(rows))
    (leak,) = of_kind(audit(open_table(tmp_path / "all.csv"), workers=1), "leak")
    assert (leak.text, keys(leak)) == ("the group p2 in train and val", ["1.png", "2.png"])


def test_several_labels_contradict_each_other_only_when_they_differ() -> None:
    plain = arrays(1, 1, 2, 2)
    several = dataclasses.replace(plain, labels=several_labels([[0, 1], [0, 1], [0], [0, 1]]))
    found = audit(Opened({"all": several}), workers=1)
    assert [finding.text for finding in of_kind(found, "contradiction")] == ["the same file as a and a;b"]
    assert len(of_kind(found, "duplicate")) == 1


def test_skew_and_single_images_are_reported() -> None:
    dataset = Dataset(
        "x", ("many", "one"), [f"{i}.jpg" for i in range(41)], single_labels([0] * 40 + [1]), Trap(refuse, ())
    )
    texts = [finding.text for finding in of_kind(audit(Opened({"train": dataset}), workers=1), "class")]
    assert texts == ["train has a single image of one", "train has 40 images of many and 1 of one, 40 times fewer"]


def test_labels_that_all_neighbours_contradict_are_found() -> None:
    labels = [0] * 20 + [1] * 20
    labels[5], labels[30] = 1, 0
    images = np.stack([np.asarray(picture(i)).transpose(2, 0, 1) for i in range(40)])
    dataset = from_arrays(images, labels, ["left", "right"])
    truth = {picture(i).tobytes(): i >= 20 for i in range(40)}

    def embed(batch: Any) -> torch.Tensor:
        noise = torch.randn(len(batch), 8, generator=torch.Generator().manual_seed(0)) / 10
        noise[:, 0] += torch.tensor([4.0 if truth[pixels.tobytes()] else -4.0 for pixels in batch])
        return noise

    found = of_kind(audit(Opened({"all": dataset}), embed=embed, workers=1), "label")
    assert sorted((finding.items[0].index, finding.text) for finding in found) == [
        (5, "looks like left"),
        (30, "looks like right"),
    ]
    assert all(finding.score is not None and finding.score > 0.9 for finding in found)


def test_labels_in_another_order_are_the_same_and_images_are_counted_not_labels() -> None:
    plain = from_arrays(np.asarray([np.asarray(picture(1)).transpose(2, 0, 1)] * 2), [0, 0], ["cat", "dog"])
    several = dataclasses.replace(plain, labels=several_labels([[0, 1], [1, 0]]))
    found = audit(Opened({"all": several}), workers=1)
    assert found.counts == {"duplicate": 1}
    assert (found.sizes, found.images) == ({"all": 2}, 2)


def test_only_sixteen_bits_are_sixteen_bits(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 2**16, (48, 48), dtype=np.uint16)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "deep.png").write_bytes(encoded(Image.fromarray(deep), "PNG"))
    (tmp_path / "a" / "plain.bmp").write_bytes(encoded(picture(1).resize((533, 48)), "BMP"))  # 1600 bytes to a row
    found = audit(open_folder(tmp_path), workers=1)
    assert [finding.items[0].key for finding in found.findings if finding.kind == "16-bit"] == ["a/deep.png"]
