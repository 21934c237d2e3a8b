"""One decoder for all: odd images become plain ones, damaged ones become one clear error."""

import errno
import io
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data import decode as decoding
from vitlab.data.augmentation.crops import CropRule, crop_and_resize
from vitlab.data.decode import (
    FORMATS,
    MAX_PIXELS,
    bits_for,
    decode,
    largest_value,
    opened,
    read,
    shrinkage,
    why_unreadable,
)
from vitlab.data.decode import pixels as pixels_of
from vitlab.data.preprocess import Preprocess, resize, scale

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


def test_every_listed_format_is_tested_above_or_with_phone_photos() -> None:
    assert set(FORMATS) == {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF"}


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


# --- fast JPEGs -------------------------------------------------------------------------------------------------------


def mosaic(rows: int, cols: int) -> Image.Image:
    """Real photos side by side at their own scale: all their detail in single pixels."""
    path = Path(os.environ.get("VITLAB_DATA", "../shared/data")) / "imagenet_samples" / "imagenet_850.npz"
    if not path.is_file():
        pytest.skip(f"needs the photos of {path}; VITLAB_DATA says where they are")
    packed = np.load(path)
    raw, offsets = packed["data"][: packed["offsets"][40]].tobytes(), packed["offsets"]
    tiles = [Image.open(io.BytesIO(raw[offsets[i] : offsets[i + 1]])).crop((0, 0, 160, 160)) for i in range(40)]
    canvas, places = Image.new("RGB", (cols, rows)), ((y, x) for y in range(0, rows, 160) for x in range(0, cols, 160))
    for number, (top, left) in enumerate(places):
        canvas.paste(tiles[number * 7 % 40], (left, top))
    return canvas


JPEG_KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"quality": 90},
    "4:2:2": {"quality": 80, "subsampling": 1},
    "4:4:4": {"quality": 95, "subsampling": 0},
    "progressive": {"quality": 85, "progressive": True},
    "optimised": {"quality": 50, "optimize": True},
    "RGB inside": {"quality": 90, "keep_rgb": True},
    "restarts": {"quality": 90, "restart_marker_rows": 1},
}


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("kind", JPEG_KINDS)
def test_the_fast_way_gives_the_bits_of_pillow(
    kind: str, mode: Any, shrink: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    noise = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((131, 97), Image.BICUBIC).convert(mode)
    raw = encode(picture, "JPEG", **{k: v for k, v in JPEG_KINDS[kind].items() if (mode, k) != ("L", "keep_rgb")})
    fast = decoding._fast_jpeg
    results: list[torch.Tensor] = []
    for way in (fast, lambda *_: None):
        monkeypatch.setattr(decoding, "_fast_jpeg", way)
        with opened(raw) as image:
            results.append(pixels_of(image, mode, shrink))
    assert torch.equal(*results)
    assert results[0].shape == (len(mode), -(-97 // shrink), -(-131 // shrink))
    with opened(raw) as image:
        assert fast(image, mode, shrink) is not None, "the fast way was taken at all"


@pytest.mark.parametrize("channels", ["CMYK", "grey for RGB", "RGB for grey"])
def test_other_jpegs_are_left_to_pillow(channels: str) -> None:
    picture = Image.fromarray(PHOTO)
    raw, mode = {
        "CMYK": (encode(picture.convert("CMYK"), "JPEG"), "RGB"),
        "grey for RGB": (encode(picture.convert("L"), "JPEG"), "RGB"),
        "RGB for grey": (encode(picture, "JPEG"), "L"),
    }[channels]
    with opened(raw) as image:
        assert decoding._fast_jpeg(image, mode, 1) is None  # type: ignore[arg-type]
    assert np.array_equal(pixels(raw, mode).squeeze(), np.asarray(Image.open(io.BytesIO(raw)).convert(mode)))


@pytest.mark.parametrize("seed", slow_after(1, range(6)))
def test_damaged_jpeg_is_what_pillow_makes_of_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, whole, fast = np.random.default_rng(seed), encode(PHOTO, "JPEG"), decoding._fast_jpeg
    for _ in range(50):
        raw = bytearray(whole)
        raw[chance.integers(len(raw))] = chance.integers(256)
        outcomes: list[Any] = []
        for way in (fast, lambda *_: None):
            monkeypatch.setattr(decoding, "_fast_jpeg", way)
            try:
                outcomes.append(decode(bytes(raw), "RGB").tolist())
            except FileProblem as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("times", "shrink"), [(4, 2), (12, 4), (24, 8)])
def test_jpeg_shrunk_while_decoding_moves_pixels_by_less_than_one_level_on_average(times: int, shrink: int) -> None:
    target = (48, 64)
    raw = encode(mosaic(times * target[0], times * target[1]), "JPEG", quality=90)
    with opened(raw) as image:
        assert shrinkage(image, (times * target[0], times * target[1]), target, Preprocess()) == shrink
        full = pixels_of(image, "RGB")
    with opened(raw) as image:
        small = pixels_of(image, "RGB", shrink)
    ours, exact = (scale(x[None], target, "bilinear", True).float() for x in (small, full))
    assert 0 < float((ours - exact).abs().mean()) < 1
    assert torch.equal(read(raw, Preprocess(image_size=target)), ours[0].to(torch.uint8)), "and `read` does so"


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize(("rows", "cols", "turn"), [(193, 259, 1), (581, 778, 1), (1157, 1543, 1), (577, 770, 3)])
def test_jpeg_of_odd_sides_is_not_shifted_by_shrinking(rows: int, cols: int, turn: int, how: Any) -> None:
    described = Image.Exif()
    described[0x0112] = turn
    raw = encode(mosaic(rows, cols), "JPEG", quality=90, exif=described)
    for rule in (
        Preprocess(image_size=(48, 64), filter=how),
        Preprocess(image_size=(32, 32), filter=how, resize="shorter-side", crop_frac=0.875),
    ):
        exact = resize(rule, decode(raw, "RGB")[None])[0]
        assert float((read(raw, rule).float() - exact.float()).abs().mean()) < 1


def test_nothing_is_shrunk_too_far_without_antialias_or_without_a_jpeg() -> None:
    with opened(encode(Image.new("RGB", (400, 400)), "JPEG")) as image:
        assert shrinkage(image, (400, 400), (100, 100), Preprocess()) == 2
        assert shrinkage(image, (399, 400), (100, 100), Preprocess()) == 1
        assert shrinkage(image, (400, 400), (100, 100), Preprocess(antialias=False)) == 1
        assert shrinkage(image, (400, 400), (100, 100), Preprocess(filter="area")) == 1
    with opened(encode(Image.new("RGB", (400, 400)), "PNG")) as image:
        assert shrinkage(image, (400, 400), (100, 100), Preprocess()) == 1


def test_image_that_was_changed_in_memory_is_not_read_from_its_file_again() -> None:
    image = Image.open(io.BytesIO(encode(PHOTO, "JPEG")))
    image.paste("red", (0, 0, *image.size))
    assert pixels(image)[3, 3].tolist() == [255, 0, 0]


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


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F")


def in_mode(mode: str) -> Image.Image:
    """The photo in one of Pillow's modes that a TIFF can hold."""
    grey = Image.fromarray(PHOTO).convert("L")
    if mode in ("I;16", "I"):
        return Image.fromarray(np.asarray(grey).astype(np.uint16 if mode == "I;16" else np.int32) * 257)
    if mode == "F":
        return Image.fromarray(np.asarray(grey).astype(np.float32) / 255)
    if mode == "LAB":
        return Image.merge("LAB", Image.fromarray(PHOTO).split())
    return Image.fromarray(PHOTO).convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_eight_orientations_of_every_mode_are_one_tensor_for_training_and_evaluation(mode: str) -> None:
    picture = in_mode(mode)
    assert picture.mode == mode
    expected = pixels(encode(picture, "TIFF"))
    rule = Preprocess(image_size=(12, 14))
    whole = CropRule(how="squash", crop_frac=1.0)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        raw = encode(picture, "TIFF", exif=exif)
        upright = np.ascontiguousarray(UPRIGHT[orientation](expected))
        assert np.array_equal(pixels(raw), upright)
        evaluated = read(raw, rule)
        assert torch.equal(evaluated, resize(rule, torch.from_numpy(upright).permute(2, 0, 1)[None])[0])
        assert torch.equal(crop_and_resize(raw, rule, whole, seed=0, epoch=0, sample=0), evaluated)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("1", (0, 255)),
        ("L", (11, 165)),
        ("LA", (11, 165)),
        ("I;16", (11, 165)),
        ("I", (11, 165)),
        ("F", (11, 165)),
        ("CMYK", (11, 165)),
        ("YCbCr", (11, 165)),
    ],
)
def test_every_mode_becomes_grey_by_its_rule(mode: str, expected: tuple[int, int]) -> None:
    grey = pixels(encode(in_mode(mode), "TIFF"), "L")[..., 0]
    assert np.abs(np.array([grey[0, 0], grey[-1, -1]], int) - expected).max() <= (0 if mode == "1" else 2)


def test_hue_saturation_and_value_become_rgb() -> None:
    picture = Image.merge("HSV", [Image.new("L", (1, 1), value) for value in (85, 255, 200)])  # a third round: green
    assert pixels(picture).tolist() == [[[0, 200, 0]]]


def test_sixteen_bit_colour_png_is_scaled() -> None:
    rows = b"".join(b"\0" + (np.arange(8) * 8192 + row).astype(">u2").repeat(3).tobytes() for row in range(4))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 8, 4, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    raw = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    assert pixels(raw)[0, :, 0].tolist() == [32 * i for i in range(8)]


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0])
def test_floats_are_scaled_by_the_least_white_that_holds_them(white: float) -> None:
    ramp = np.linspace(0, white, 256, dtype=np.float32)[None]
    assert pixels(encode(ramp, "TIFF"), "L").flatten().tolist() == list(range(256))
    ramp[0, :2] = [np.nan, -np.inf]
    assert pixels(encode(ramp, "TIFF"), "L").flatten().tolist() == [0, 0, *range(2, 256)]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_sixteen_bits_are_scaled_not_clipped_to_white(kind: str, mode: str) -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    out = pixels(encode(ramp, kind), mode)
    assert np.abs(out.astype(float) - ramp[..., None] / 257).max() <= 1
    assert abs(out.mean() - ramp.mean() / 257) <= 1 / 255


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_deep_images_are_scaled_by_the_bits_that_they_make_use_of(kind: str, bits: int) -> None:
    ramp = np.linspace(0, 2**bits - 1, 256).astype(np.uint16)[None]
    raw = encode(ramp, kind)
    assert bits_for(largest_value(raw)) == bits
    assert decode(raw, "L", bits).flatten().tolist() == list(range(256))
    seen = read(raw, Preprocess(mode="L", bits=bits, image_size=(1, 256), mean=(0.5,), std=(0.5,)))
    assert seen.flatten().tolist() == list(range(256))
    brighter = np.array([[2**bits - 1, 65535]], np.uint16)
    assert decode(encode(brighter, kind), "L", bits).flatten().tolist() == [255, 255]


def test_floats_of_twelve_bits_are_scaled_as_whole_numbers_are() -> None:
    ramp = np.linspace(0, 4095, 256, dtype=np.float32)[None]
    raw = encode(ramp, "TIFF")
    assert (largest_value(raw), bits_for(4095), bits_for(4096)) == (4095, 12, 14)
    assert decode(raw, "L", 12).flatten().tolist() == list(range(256))
    assert largest_value(encode(ramp / 4095, "TIFF")) == 0, "from 0 to 1: its white is known"


def test_images_of_eight_bits_have_a_known_range() -> None:
    for picture in (PHOTO, PHOTO[:, :, 0]):
        assert largest_value(encode(picture, "PNG")) == 0
        assert torch.equal(decode(encode(picture, "PNG"), "L", 12), decode(encode(picture, "PNG"), "L"))


@pytest.mark.parametrize("bits", [7, 17])
def test_bits_that_no_file_has_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match=f"8 to 16, not {bits}"):
        Preprocess(bits=bits)


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
def test_broken_file_is_named_without_internals(tmp_path: Path, name: str) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(BROKEN[name])
    with pytest.raises(FileProblem, match=r"photo\.jpg is not a readable image") as caught:
        decode(path, "RGB")
    with pytest.raises(FileProblem, match="given image is not") as caught_bytes:
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


def test_missing_file_folder_and_text_with_nul_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"absent\.jpg does not exist"):
        decode(tmp_path / "absent.jpg", "RGB")
    with pytest.raises(FileProblem, match="is a folder, not a regular file"):
        decode(tmp_path, "RGB")
    with pytest.raises(FileProblem):
        decode("a\0b.jpg", "RGB")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encode(PHOTO, "PNG"))
    path.chmod(0)
    with pytest.raises(FileProblem, match="no permission to read"):
        decode(path, "RGB")


@pytest.mark.parametrize(
    ("size", "printed"),
    [
        ((8000, 5001), "has 8000x5001 pixels"),
        pytest.param((10_000, 10_000), "has 10000x10000 pixels", marks=pytest.mark.slow),
        # Pillow refuses this one itself, before it tells the size.
        pytest.param((14_000, 14_000), "has too many pixels", marks=pytest.mark.slow),
    ],
    ids=["40 MP", "100 MP", "196 MP"],
)
def test_too_many_pixels_are_refused_by_the_header_alone(
    least_seconds: Callable[..., float], size: tuple[int, int], printed: str
) -> None:
    raw = encode(Image.new("1", size), "PNG")
    with pytest.raises(FileProblem, match=f"{printed}; the limit is {MAX_PIXELS:,}"):
        decode(raw, "L")
    assert least_seconds(decode, raw, "L") < 0.01


def test_image_at_the_pixel_limit_is_accepted() -> None:
    assert decode(encode(Image.new("1", (8000, 5000)), "PNG"), "L").shape == (1, 5000, 8000)


def test_threads_leave_the_filters_of_warnings_as_they_were() -> None:
    before, pace = list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: decode(JPEG, "RGB"), range(400)))
        assert list(warnings.filters) == before
    finally:
        sys.setswitchinterval(pace)


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_arrays_of_one_and_three_channels_are_accepted_whatever_their_strides() -> None:
    assert np.array_equal(pixels(PHOTO[::-1, ::2]), PHOTO[::-1, ::2])
    assert np.array_equal(pixels(PHOTO[..., :1], "L"), PHOTO[..., :1])
    assert np.array_equal(pixels(PHOTO[..., 0], "L"), PHOTO[..., :1])


@pytest.mark.parametrize(
    "array",
    [
        np.full((4, 4), 2.0),
        np.full((4, 4), np.nan),
        np.full((4, 4), -0.1, np.float32),
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


def test_tensors_have_their_channels_first_and_floats_go_from_0_to_1() -> None:
    tensor = torch.from_numpy(PHOTO).permute(2, 0, 1)
    wanted = decode(PHOTO, "RGB")
    for given in (tensor, tensor / 255, (tensor / 255).double(), PHOTO / 255, PHOTO.astype(np.float32) / 255):
        assert torch.equal(decode(given, "RGB"), wanted)
        assert torch.equal(decode(given, "array"), wanted)
    assert torch.equal(decode(tensor[0] / 255, "L"), wanted[:1])
    assert torch.equal(decode(tensor.float().div(255).requires_grad_(), "RGB"), wanted)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.zeros(5, 4, 4, dtype=torch.uint8), r"1 or 3 channels, not 5"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8).expand(4, 4, 3), r"1 or 3 channels, not 4"),
        (torch.zeros(1, 3, 4, 4), r"in a tensor \[C, Y, X\], not float32 \[1, 3, 4, 4\]"),
        (torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)), r"float32 \[3, 8, 8\] from -"),
        (torch.full((3, 4, 4), 255.0), r"from 255 to 255\s+Divide values up to 255"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), r"not int32"),
        (torch.zeros(3, 0, 4), r"not float32 \[3, 0, 4\]"),
    ],
)
def test_other_tensors_are_refused_with_the_reason(given: torch.Tensor, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        decode(given, "RGB")


def test_array_without_pixels_is_refused() -> None:
    with pytest.raises(UsageError):
        decode(np.zeros((0, 5), np.uint8), "L")


@pytest.mark.parametrize(("content", "why"), [(JPEG[:-20], "it is damaged or cut short"), (b"", "it is empty")])
def test_why_a_file_cannot_be_read_is_reported(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    for source in (path, content):
        with pytest.raises(FileProblem, match=f"is not a readable image: {why}$"):
            decode(source, "RGB")


def test_what_happened_to_an_image_stands_behind_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileProblem) as damaged:
        decode(JPEG[:-20], "RGB")
    assert why_unreadable(damaged.value) == "is not a readable image: it is damaged or cut short"
    with pytest.raises(OSError) as gone:
        (tmp_path / "gone.jpg").read_bytes()
    assert why_unreadable(gone.value) == "no longer exists"
    with pytest.raises(OSError) as folder:
        tmp_path.read_bytes()
    assert why_unreadable(folder.value) == "is a folder"
    assert why_unreadable(OSError(errno.EIO, "Input/output error")) == "cannot be read: Input/output error"


@pytest.mark.parametrize("fast", [False, True])
def test_an_image_that_was_given_open_stays_as_it_was(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrunk for one answer, it would give another the next time."""
    if fast:
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decoding, "simplejpeg", None)
    raw, rule = encode(Image.fromarray(PHOTO).resize((1600, 1200)), "JPEG"), Preprocess(image_size=(32, 32))
    with Image.open(io.BytesIO(raw)) as image:
        for _ in range(2):
            assert torch.equal(read(image, rule), read(raw, rule))
            assert image.size == (1600, 1200)
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(raw))))
