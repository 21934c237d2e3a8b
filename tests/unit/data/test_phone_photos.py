"""HEIC and AVIF, as phones write them: read where a decoder is installed, else reported with the line that installs it."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

import vitlab.data.decode
from vitlab.core.errors import FileProblem
from vitlab.data.auditing.audit import audit
from vitlab.data.dataset import Opened
from vitlab.data.decode import decode, read, why_unreadable
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data

INSTALL = "pip install 'vitlab[heic]'"
# Smooth, since HEIC and AVIF are lossy; and not square, so that a wrong turn is seen.
PHOTO = Image.fromarray(np.random.default_rng(3).integers(0, 256, (4, 6, 3), np.uint8)).resize((96, 64))


def heic(image: Image.Image, **options: Any) -> bytes:
    heif = pytest.importorskip("pillow_heif", reason="the extra 'heic' is not installed")
    buffer = io.BytesIO()
    heif.from_pillow(image).save(buffer, quality=95, chroma=444, **options)
    return buffer.getvalue()


def avif(image: Image.Image) -> bytes:
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    buffer = io.BytesIO()
    image.save(buffer, "AVIF", quality=95)
    return buffer.getvalue()


@pytest.mark.parametrize("encode", [heic, avif])
def test_pixels_are_nearly_those_that_were_stored(encode: Any) -> None:
    pixels = decode(encode(PHOTO), "RGB").permute(1, 2, 0).numpy()
    assert pixels.shape == (64, 96, 3)
    assert np.abs(pixels.astype(int) - np.asarray(PHOTO).astype(int)).mean() < 3


def test_turned_photo_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = heic(PHOTO, exif=exif.tobytes())
    upright = np.asarray(PHOTO.transpose(Image.Transpose.ROTATE_270)).astype(int)
    pixels = decode(raw, "RGB").permute(1, 2, 0).numpy()
    assert pixels.shape == upright.shape
    assert np.abs(pixels - upright).mean() < 3


def test_pillow_opens_no_more_than_before() -> None:
    before = set(Image.OPEN)
    decode(heic(PHOTO), "RGB")
    assert "HEIF" not in set(Image.OPEN) - before


def test_folder_of_phone_photos_is_opened_read_and_audited(tmp_path: Path) -> None:
    for name, raw in {
        "cat/1.HEIC": heic(PHOTO),
        "cat/2.avif": avif(PHOTO.rotate(90)),
        "dog/1.heif": heic(PHOTO),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    data = open_data(tmp_path).parts["all"]
    assert list(data.keys) == ["cat/1.HEIC", "cat/2.avif", "dog/1.heif"]
    found = audit(Opened({"all": data}), workers=1)
    assert found.formats == {"AVIF": 1, "HEIF": 2}
    assert not {"unreadable", "damaged", "name"} & set(found.counts)


def test_missing_extra_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "photo.heic"
    path.write_bytes(heic(PHOTO))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(FileProblem) as reported:
        decode(path, "RGB")
    assert str(reported.value) == f"{path} is a HEIC photo. Install what reads them:  {INSTALL}"
    with pytest.raises(FileProblem) as reported:
        decode(path.read_bytes(), "RGB")
    assert INSTALL in why_unreadable(reported.value)


def test_pixels_are_limited_and_damage_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = heic(PHOTO)
    with pytest.raises(FileProblem, match="damaged or cut short"):
        decode(raw[: len(raw) - 40], "RGB")
    monkeypatch.setattr(vitlab.data.decode, "MAX_PIXELS", 3800)
    with pytest.raises(FileProblem, match="has 96x64 pixels; the limit is"):
        decode(raw, "RGB")


def test_heic_may_have_more_pixels_than_others_for_phones_take_48_million(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, photo = heic(PHOTO), io.BytesIO()
    PHOTO.save(photo, "PNG")
    monkeypatch.setattr(vitlab.data.decode, "MAX_PIXELS", 96 * 64 * 40 // 48)
    assert decode(raw, "RGB").shape == (3, 64, 96)
    rule = Preprocess(image_size=(16, 16))
    assert read(raw, rule).shape == (3, 16, 16)
    with pytest.raises(FileProblem, match="has 96x64 pixels; the limit is"):
        decode(photo.getvalue(), "RGB")
