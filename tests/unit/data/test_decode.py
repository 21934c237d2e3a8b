"""One decoder for all: odd images become plain ones, damaged ones become one clear error."""

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.decode import FORMATS, MAX_PIXELS, decode

COLUMN, ROW = np.meshgrid(np.arange(0, 210, 10), np.arange(0, 170, 10))
PHOTO = np.stack([COLUMN, ROW, np.full_like(ROW, 99)], axis=-1).astype(np.uint8)


def encode(image: Image.Image | np.ndarray[Any, Any], kind: str, **options: Any) -> bytes:
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


def pixels(source: Any, mode: Any = "RGB") -> np.ndarray[Any, Any]:
    """[Y, X, C] as numpy, after the promise about type and layout was checked."""
    out = decode(source, mode)
    assert out.dtype == torch.uint8
    assert out.is_contiguous()
    assert out.shape[0] == len(mode)
    return out.permute(1, 2, 0).numpy()


# --- what is accepted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("GIF", {})]
)
def test_lossless_formats_give_the_exact_pixels(kind: str, options: dict[str, Any]) -> None:
    picture = PHOTO if kind != "GIF" else np.asarray(Image.fromarray(PHOTO).quantize(16).convert("RGB"))
    assert np.array_equal(pixels(encode(picture, kind, **options)), picture)


def test_jpeg_gives_nearly_the_same_pixels() -> None:
    out = pixels(encode(PHOTO, "JPEG", quality=95, subsampling=0))
    assert np.abs(out.astype(int) - PHOTO).max() <= 8


def test_every_listed_format_is_tested_above() -> None:
    assert set(FORMATS) == {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"}


def test_path_text_bytes_picture_and_array_agree(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encode(PHOTO, "PNG"))
    for source in (path, str(path), path.read_bytes(), Image.fromarray(PHOTO), PHOTO):
        assert np.array_equal(pixels(source), PHOTO)


def test_content_counts_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(encode(PHOTO, "PNG"))
    assert np.array_equal(pixels(path), PHOTO)


@pytest.mark.parametrize("kind", ["PPM", "PCX", "TGA", "ICO", "SGI", "PDF", "EPS"])
def test_format_that_is_not_on_the_list_is_refused(kind: str) -> None:
    with pytest.raises(FileProblem, match="Accepted: JPEG, PNG"):
        decode(encode(PHOTO, kind), "RGB")


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
        raw = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert pixels(raw)[0, 0].tolist() == [255, 0, 0]


# --- odd images become plain ones -------------------------------------------------------------------------------------

UPRIGHT: dict[int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_turned_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    out = pixels(encode(PHOTO, kind, exif=exif, **options))
    assert np.array_equal(out, UPRIGHT[orientation](PHOTO))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_of_a_jpeg_is_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = pixels(encode(PHOTO, "JPEG", exif=exif, quality=95, subsampling=0))
    assert np.abs(out.astype(int) - UPRIGHT[orientation](PHOTO)).max() <= 8


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_sixteen_bits_are_scaled_not_clipped_to_white(kind: str, mode: str) -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    out = pixels(encode(ramp, kind), mode)
    assert np.abs(out.astype(float) - ramp[..., None] / 257).max() <= 1


@pytest.mark.parametrize(
    "ramp",
    [
        np.array([[0, 256, 1000, 65535]], np.int32),
        np.array([[-3.0, 0.0, 100.5, 255.0, 1e9]], np.float32),
        pytest.param(
            np.array([[-5, 0, 65535, 70_000, 2**31 - 1]], np.int32),
        ),
    ],
    ids=["16 in 32 bits", "float", "32 bits"],
)
def test_brighter_pixels_never_come_out_darker(ramp: np.ndarray[Any, Any]) -> None:
    out = pixels(encode(ramp, "TIFF"), "L").flatten().astype(int)
    assert (np.diff(out) >= 0).all()
    assert (out[0], out[-1]) == (0, 255)


@pytest.mark.parametrize(
    ("alpha", "grey"),
    [(0, 255), (255, 0), (128, 127)],
)
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_see_through_is_shown_on_white(mode: str, alpha: int, grey: int) -> None:
    picture = Image.new(mode, (2, 2), (0,) * (len(mode) - 1) + (alpha,))
    assert pixels(encode(picture, "PNG")).flatten().tolist() == [grey] * 12
    assert pixels(picture, "L").flatten().tolist() == [grey] * 4


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_colour_is_shown_on_white(kind: str) -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([10, 20, 30, 200, 0, 0])
    picture.putpixel((1, 0), 1)
    assert pixels(encode(picture, kind)).tolist() == [[[10, 20, 30], [200, 0, 0]]]
    assert pixels(encode(picture, kind, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    inks = Image.merge("CMYK", [Image.new("L", (16, 16), ink) for ink in (0, 0, 255, 0)])
    out = pixels(encode(inks, kind))[8, 8].astype(int)
    assert np.abs(out - [255, 255, 0]).max() <= 3


def test_black_and_white_becomes_0_and_255() -> None:
    picture = Image.fromarray(np.array([[True, False]]))
    assert pixels(encode(picture, "PNG"), "L").flatten().tolist() == [255, 0]


def test_colour_becomes_grey_by_luminance() -> None:
    primaries = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    assert pixels(primaries, "L").flatten().tolist() == [76, 150, 29]  # ITU-R 601


def test_grey_becomes_three_equal_channels() -> None:
    assert pixels(np.array([[7, 9]], np.uint8)).tolist() == [[[7, 7, 7], [9, 9, 9]]]


# --- what is refused --------------------------------------------------------------------------------------------------

JPEG = encode(PHOTO, "JPEG")
BROKEN = {
    "empty": b"",
    "text": b"not an image, whatever it is called",
    "header only": JPEG[:20],
    "half a jpeg": JPEG[: len(JPEG) // 2],
    "half a png": encode(PHOTO, "PNG")[:60],
    "half a webp": encode(PHOTO, "WEBP")[:40],
    "half a gif": encode(PHOTO, "GIF")[:30],
    "half a bmp": encode(PHOTO, "BMP")[:200],
    "half a tiff": encode(PHOTO, "TIFF")[:30],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_named_and_nothing_internal_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(BROKEN[name])
    with pytest.raises(FileProblem, match=r"photo\.jpg is not a readable image") as caught:
        decode(path, "RGB")
    with pytest.raises(FileProblem, match="the given image is not a readable image") as caught_bytes:
        decode(BROKEN[name], "RGB")
    for error in (caught.value, caught_bytes.value):
        assert "0x" not in str(error)
        assert "BytesIO" not in str(error)
        assert error.__suppress_context__


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_file_cut_anywhere_gives_the_whole_image_or_one_error(kind: str) -> None:
    whole = encode(PHOTO, kind)
    expected, failures = pixels(whole), 0
    for length in range(0, len(whole), 5):
        try:
            assert np.array_equal(pixels(whole[:length]), expected)
        except FileProblem:
            failures += 1
    assert failures >= 0.75 * len(whole) / 5, "only a file that lacks its last few bytes may pass"


def test_missing_file_folder_and_text_with_nul_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"absent\.jpg does not exist"):
        decode(tmp_path / "absent.jpg", "RGB")
    with pytest.raises(FileProblem, match="is a folder, not an image"):
        decode(tmp_path, "RGB")
    with pytest.raises(FileProblem):
        decode("a\0b.jpg", "RGB")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_told(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encode(PHOTO, "PNG"))
    path.chmod(0)
    with pytest.raises(FileProblem, match="no permission to read"):
        decode(path, "RGB")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((8000, 5001), "has 8000x5001 pixels"),
        ((10_000, 10_000), "has 10000x10000 pixels"),
        ((14_000, 14_000), "has too many pixels"),  # Pillow refuses this one itself, before it tells the size
    ],
    ids=["40 MP", "100 MP", "196 MP"],
)
def test_too_many_pixels_are_refused_by_the_header_alone(size: tuple[int, int], said: str) -> None:
    raw = encode(Image.new("1", size), "PNG")
    started = time.perf_counter()
    with pytest.raises(FileProblem, match=f"{said}; the limit is {MAX_PIXELS:,}"):
        decode(raw, "L")
    assert time.perf_counter() - started < 0.1


def test_image_at_the_pixel_limit_is_accepted() -> None:
    assert decode(encode(Image.new("1", (8000, 5000)), "PNG"), "L").shape == (1, 5000, 8000)


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_arrays_of_one_and_three_channels_are_accepted_whatever_their_strides() -> None:
    assert np.array_equal(pixels(PHOTO[::-1, ::2]), PHOTO[::-1, ::2])
    assert np.array_equal(pixels(PHOTO[..., :1], "L"), PHOTO[..., :1])
    assert np.array_equal(pixels(PHOTO[..., 0], "L"), PHOTO[..., :1])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4)),
        np.zeros((4, 4), np.int64),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_other_arrays_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match="an image array must be uint8"):
        decode(array, "RGB")


def test_array_without_pixels_is_refused() -> None:
    with pytest.raises(UsageError):
        decode(np.zeros((0, 5), np.uint8), "L")
