"""Hostile and broken image files, each with the outcome it must have. The letters and numbers are those of the fault list.

D12 to D16 and D18 to D20 are faults of folders, loaders and shards, and are tested with those.
"""

import io
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem
from vitlab.data.augmentation.crops import CropRule, crop_and_resize
from vitlab.data.decode import FORMATS, decode, read
from vitlab.data.preprocess import Preprocess

PHOTO = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
RULE = Preprocess(image_size=(16, 16))


def encode(image: Image.Image | np.ndarray[Any, Any], kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, format=kind, **options)
    return buffer.getvalue()


JPEG, PNG = encode(PHOTO, "JPEG"), encode(PHOTO, "PNG")


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand, for what Pillow would not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def refused(source: Any, what: str = "is not a readable image") -> None:
    """By training and evaluation alike, with a text that holds nothing of the inside."""
    attempts = (
        lambda: read(source, RULE),
        lambda: crop_and_resize(source, RULE, CropRule(), seed=0, epoch=0, sample=0),
    )
    for attempt in attempts:
        with pytest.raises(FileProblem, match=what) as caught:
            attempt()
        assert "0x" not in str(caught.value) and "Traceback" not in str(caught.value)


def accepted(source: Any) -> torch.Tensor:
    out = read(source, RULE)
    assert out.shape == (3, 16, 16) and out.dtype == torch.uint8
    assert crop_and_resize(source, RULE, CropRule(), seed=0, epoch=0, sample=0).shape == (3, 16, 16)
    return out


def test_d1_jpeg_cut_at_every_fifth_byte_is_refused_by_decoding() -> None:
    for length in range(0, len(JPEG) - 2, 5):
        with pytest.raises(FileProblem):
            read(JPEG[:length], RULE)


@pytest.mark.parametrize("content", [b"", b"\0", b"hello, this is not a photo", b"\xff\xd8\xff", b"<svg></svg>"])
def test_d2_empty_and_text_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    refused(path, r"photo\.jpg is not a readable image")


def test_d3_wrong_extension_is_decoded_by_content(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(PNG)
    assert torch.equal(accepted(path), accepted(PNG))


@pytest.mark.parametrize(
    "content",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"8BPS\0\1" + bytes(40),
        b"SIMPLE  =                    T" + bytes(2850),
        b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
        b"%PDF-1.7\n",
        encode(PHOTO, "PPM"),
        encode(PHOTO, "ICO"),
    ],
    ids=["EPS", "PSD", "FITS", "JPEG 2000", "PDF", "PPM", "ICO"],
)
def test_d4_other_formats_are_refused_and_their_parsers_never_entered(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.init()
    for kind, (factory, accept) in Image.OPEN.items():
        if kind not in FORMATS:

            def entered(*_: Any, kind: str = kind) -> None:
                pytest.fail(f"the parser of {kind} was entered")

            monkeypatch.setitem(Image.OPEN, kind, (entered, accept))
            assert callable(factory)
    refused(content)


@pytest.mark.parametrize(("width", "height"), slow_after(1, [(8000, 6250), (13_400, 13_300), (30_000, 30_000)]))
def test_d5_bomb_is_refused_by_its_header_in_no_time_and_no_memory(
    least_seconds: Callable[..., float], width: int, height: int
) -> None:
    packer = zlib.compressobj(9)
    row = bytes(1 + width // 8)
    raw = png(width, height, 1, 0, b"".join(packer.compress(row) for _ in range(height)) + packer.flush())
    assert len(raw) < 250_000
    read(PNG, RULE)  # warm
    tracemalloc.start()
    with pytest.raises(FileProblem, match="40,000,000"):
        read(raw, RULE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert least_seconds(read, raw, RULE) < 0.01


LIMITS = {
    "50000000": "(6250, 8000)",
    "49999999": "8000x6250 pixels; the limit is 49,999,999",
    "1e9": "1 to 178,956,970, not '1e9'",
    "9" * 30: "VITLAB_MAX_PIXELS",
    "0": "VITLAB_MAX_PIXELS",
}
# The limit is read when the package is imported: a fork for each, since importing torch again takes longer than the rest.
LOOK = """
import os, sys, torch
for limit in sys.argv[2:]:
    if not os.fork():
        os.environ["VITLAB_MAX_PIXELS"] = limit
        from vitlab.core.errors import VitlabError
        try:
            from vitlab.data.decode import decode
            print(limit, tuple(decode(sys.argv[1], "L").shape[1:]), flush=True)
        except VitlabError as error:
            print(limit, str(error).replace(chr(10), " "), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_pixel_limit_can_be_set_by_the_user(tmp_path: Path) -> None:
    Image.new("1", (8000, 6250)).save(tmp_path / "large.png")
    command = [sys.executable, "-c", LOOK, tmp_path / "large.png", *LIMITS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for line, (limit, printed) in zip(lines, LIMITS.items(), strict=True):
        assert line.startswith(f"{limit} ") and printed in line


def test_d5_bomb_takes_no_memory_that_python_cannot_see() -> None:
    """tracemalloc knows Python's own memory; the process's says whether a decoder took some."""
    raw = png(8000, 6250, 1, 0, zlib.compress(bytes(1001 * 6250), 9))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux's /proc")
    with pytest.raises(FileProblem):
        read(raw, RULE)
    before = resident()
    for _ in range(20):
        with pytest.raises(FileProblem):
            read(raw, RULE)
    assert resident() - before < 5_000_000


def test_d5_long_strip_is_decoded_or_refused_in_a_sentence() -> None:
    strip = encode(Image.new("RGB", (30_000, 1), "red"), "PNG")
    accepted(strip)
    with pytest.raises(ValueError, match="too long and thin"):
        read(strip, Preprocess(image_size=(64, 64), resize="shorter-side"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_d6_orientation_equals_an_image_that_was_turned_before(orientation: int) -> None:
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.open(io.BytesIO(JPEG))
    picture.load()
    turned = picture.transpose(turns[orientation]) if orientation in turns else picture
    assert torch.equal(accepted(_with_exif(JPEG, exif.tobytes())), accepted(turned))


def _with_exif(jpeg: bytes, exif: bytes) -> bytes:
    """The same coefficients with a tag: encoding again would change pixels."""
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]


@pytest.mark.parametrize("mode", ["CMYK", "L", "LA", "P", "RGBA", "1"])
def test_d7_modes_are_converted_by_the_documented_rule(mode: str) -> None:
    red = Image.new("RGBA", (20, 20), (255, 0, 0, 255))
    expected = {"L": (76, 76, 76), "LA": (76, 76, 76), "1": (255, 255, 255)}.get(mode, (255, 0, 0))
    source = (red if mode in ("RGBA", "LA") else red.convert("RGB")).convert(mode)
    if mode == "1":
        source = Image.new("1", (20, 20), 1)
    out = accepted(encode(source, "TIFF" if mode == "CMYK" else "PNG"))
    assert int((out.int() - torch.tensor(expected).view(3, 1, 1)).abs().max()) <= 1


def test_d7_transparent_is_shown_on_white() -> None:
    assert bool((accepted(encode(Image.new("RGBA", (9, 9), (0, 0, 0, 0)), "PNG")) == 255).all())
    clear = Image.new("P", (9, 9))
    clear.putpalette([10, 20, 30])
    assert bool((accepted(encode(clear, "PNG", transparency=0)) == 255).all())


@pytest.mark.parametrize("kind", ["I;16", "I", "F"])
def test_d8_sixteen_bits_and_floats_keep_their_mean(kind: str) -> None:
    ramp = np.arange(65536).reshape(256, 256)
    stored = {"I;16": ramp.astype(np.uint16), "I": ramp.astype(np.int32), "F": (ramp / 65535).astype(np.float32)}[kind]
    mean = float(decode(encode(stored, "TIFF"), "L").float().mean()) / 255
    assert abs(mean - ramp.mean() / 65535) < 1 / 255


def test_d9_only_the_first_frame_of_an_animation_is_decoded(least_seconds: Callable[..., float]) -> None:
    frames = [Image.fromarray(np.full((16, 16), i % 251, np.uint8)) for i in range(1000)]
    raw = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], optimize=False)
    assert int(read(raw, RULE).max()) == 0
    assert least_seconds(read, raw, RULE) < 0.01


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1)])
def test_d10_smallest_and_thinnest_images(size: tuple[int, int]) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        accepted(encode(Image.new("RGB", size, "red"), kind))


def test_d11_broken_descriptions_do_not_break_the_image() -> None:
    whole = accepted(JPEG)
    for content in (
        b"Exif\0\0garbage",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(60_000),
    ):
        assert torch.equal(accepted(_with_exif(JPEG, content)), whole)
    assert torch.equal(accepted(encode(PHOTO, "PNG", icc_profile=b"no profile")), accepted(PNG))
    comments = b"\xff\xfe\xff\xff" + bytes(65533)
    assert torch.equal(accepted(JPEG[:2] + comments * 160 + JPEG[2:]), whole), "10 MB of comments"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_d17_no_permission_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(PNG)
    path.chmod(0)
    refused(path, "no permission to read")
