"""JPEGs beyond the limit of pixels are shrunk while they are decoded, in the memory of an image at the limit."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab.data.decode
from vitlab.core.errors import FileProblem
from vitlab.data.auditing.audit import audit
from vitlab.data.augmentation.crops import CropRule, crop_and_resize
from vitlab.data.dataset import Opened, single_labels
from vitlab.data.decode import decode, read
from vitlab.data.preprocess import MAX_PIXELS, Preprocess
from vitlab.data.sources.folders import open_folder

SIZES = {
    "40 MP": (8000, 5000),
    "60 MP": (9504, 6336),
    "200 MP": (16_320, 12_240),
}  # at the limit, above it, far above it
if os.environ.get("VITLAB_SOAK") == "1":
    SIZES["108 MP"] = (12_000, 9000)


def noise(width: int, height: int) -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (height // 48, width // 48, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def encode(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=70, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("large")
    paths = {name: folder / f"{name}.jpg" for name in SIZES}
    for name, path in paths.items():
        path.write_bytes(encode(noise(*SIZES[name])))
    return paths


# A fork for each: a process remembers the most memory that it ever had.
PEAKS = """
import os, resource, sys
from vitlab.data.decode import decode, read
from vitlab.data.preprocess import Preprocess
if sys.argv[1] == "pillow":
    import vitlab.data.decode
    vitlab.data.decode.simplejpeg = None
read(sys.argv[2], Preprocess())
for path in sys.argv[2:]:
    for how in ("decode", "read"):
        if not os.fork():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            shape = decode(path, "RGB").shape if how == "decode" else read(path, Preprocess()).shape
            print(how, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, *shape, flush=True)
            os._exit(0)
        os.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and counts memory in Linux's unit")
@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
@pytest.mark.slow
def test_large_jpeg_takes_no_more_memory_than_one_at_the_limit(photos: dict[str, Path], decoder: str) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg", reason="the extra 'fast' is not installed")
    command = [sys.executable, "-c", PEAKS, decoder, *map(str, photos.values())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in lines]
    (_, limit, *shape), others = rows[0], rows[2:]
    assert shape == ["3", "5000", "8000"] and len(others) == 2 * (len(SIZES) - 1), lines
    assert int(limit) > 100, "an image at the limit has 120 MB of pixels"
    for how, megabytes, _, rows_, cols in others:
        assert int(megabytes) <= 1.1 * int(limit), lines
        assert int(rows_) * int(cols) <= MAX_PIXELS, lines
        assert how == "decode" or (rows_, cols) == ("224", "224"), lines


@pytest.mark.slow
def test_200_megapixels_are_read_and_look_the_same(photos: dict[str, Path]) -> None:
    """Each 48 x 48 block of the photo is one colour; a pixel of the result is about one block."""
    width, height = SIZES["200 MP"]
    rule = Preprocess(image_size=(height // 48, width // 48))
    wanted_YXC = np.asarray(noise(width, height).resize((width // 48, height // 48), Image.Resampling.BOX))
    error = read(photos["200 MP"], rule).permute(1, 2, 0).float() - torch.from_numpy(wanted_YXC.copy()).float()
    plain = read(photos["40 MP"], Preprocess(image_size=(5000 // 48, 8000 // 48))).permute(1, 2, 0).float()
    small_YXC = np.asarray(noise(8000, 5000).resize((8000 // 48, 5000 // 48), Image.Resampling.BOX))
    assert error.abs().mean() < (plain - torch.from_numpy(small_YXC.copy()).float()).abs().mean() + 1


def test_forced_shrinking_gives_what_the_whole_image_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a low limit, where the image can be decoded in full beside it: read, cropped, turned."""
    smooth = Image.fromarray(np.random.default_rng(1).integers(0, 256, (12, 16, 3), np.uint8)).resize((803, 601))
    exif = Image.Exif()
    for turn in range(1, 9):
        exif[0x0112] = turn
        raw = encode(smooth, exif=exif)
        rule, crop = Preprocess(image_size=(200, 150)), CropRule(how="inception", area=(0.3, 1.0))
        whole = read(raw, rule).float(), crop_and_resize(raw, rule, crop, seed=1, epoch=0, sample=turn).float()
        monkeypatch.setattr(vitlab.data.decode, "MAX_PIXELS", 150_000)
        shrunk = read(raw, rule).float(), crop_and_resize(raw, rule, crop, seed=1, epoch=0, sample=turn).float()
        assert decode(raw, "RGB").shape[1:].numel() <= 150_000
        monkeypatch.undo()
        for a, b in zip(whole, shrunk, strict=True):
            assert 0 < (a - b).abs().mean() < 4, turn  # half a pixel at the most, where padding comes first


@pytest.mark.parametrize("how", ["progressive", "PNG", "scans", "too large"])
def test_what_cannot_be_shrunk_while_it_is_decoded_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitlab.data.decode, "MAX_PIXELS", 100_000)
    image, raw = noise(480, 384), b""
    if how == "PNG":
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        raw = buffer.getvalue()
    elif how == "scans":  # a sequential JPEG may hold its components one after the other; libjpeg then keeps them all
        raw = encode(image)
        scan = raw.index(b"\xff\xda")
        raw = raw[:scan] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + raw[scan + 14 :]
    elif how == "too large":
        monkeypatch.setattr(vitlab.data.decode, "_JPEG_PIXELS", 180_000)
        raw = encode(image)
    else:
        raw = encode(image, progressive=True)
    with pytest.raises(FileProblem, match="has 480x384 pixels; the limit is"):
        decode(raw, "RGB")


def test_forged_size_of_a_cut_file_is_an_error() -> None:
    raw = bytearray(encode(noise(480, 384)))
    size = raw.index(b"\xff\xc0") + 5
    raw[size : size + 4] = (12_000).to_bytes(2) + (16_000).to_bytes(2)
    with pytest.raises(FileProblem, match="damaged or cut short"):
        decode(bytes(raw[:-2]), "RGB")  # without the end mark, behind which libjpeg would be content with grey


@pytest.mark.slow
def test_audit_looks_at_large_jpegs_and_has_nothing_against_them(photos: dict[str, Path], tmp_path: Path) -> None:
    for name in ("60 MP", "200 MP"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").symlink_to(photos[name])
    opened = open_folder(tmp_path)
    found = audit(Opened({"all": opened.parts["all"]}), workers=1)
    assert opened.parts["all"].labels.values.equal(single_labels([0, 1]).values)
    assert "unreadable" not in found.counts and found.counts["huge"] == 2
