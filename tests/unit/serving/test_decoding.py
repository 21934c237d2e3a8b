"""Decoders: the pixels of `read`, fixed codes for what cannot be read, and a new process for one that was lost."""

import asyncio
import io
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import FileProblem
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess
from vitlab.serving.decoding import _REASONS, Decoders, _decoded, pack_photo, unpack_photo
from vitlab.serving.errors import OF_IMAGES, PROBLEMS, Refusal
from vitlab.serving.explaining import see

RULE = Preprocess(image_size=(16, 24))
PHOTO = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


GOOD = encode(Image.fromarray(PHOTO))


@pytest.fixture(scope="module")
def decoders() -> Generator[Decoders]:
    lost.clear()
    made = Decoders(1, 120.0, 2**28, lambda: lost.append(1))
    yield made
    made.close()


lost: list[int] = []


def decode(decoders: Decoders, data: bytes, rule: Preprocess = RULE) -> bytes:
    return asyncio.run(decoders.decode(data, rule))


def test_pixels_are_those_of_read(decoders: Decoders) -> None:
    assert decode(decoders, GOOD) == read(GOOD, RULE).permute(1, 2, 0).numpy().tobytes()


def process_of(decoders: Decoders) -> int:
    (decoder,) = decoders._all
    return decoder._process.pid


def test_image_is_decoded_by_another_where_a_decoder_was_killed(decoders: Decoders) -> None:
    before = len(lost)
    os.kill(process_of(decoders), signal.SIGKILL)
    assert decode(decoders, GOOD) and len(lost) == before + 1


def test_decoder_that_hangs_is_replaced(decoders: Decoders) -> None:
    before = len(lost)
    assert decode(decoders, GOOD)
    os.kill(process_of(decoders), signal.SIGSTOP)
    decoders._seconds = 0.2
    with pytest.raises(Refusal, match="costly_image"):
        decode(decoders, GOOD)
    decoders._seconds = 120.0
    assert decode(decoders, GOOD) and len(lost) == before + 1


def test_decoder_that_cannot_be_started_is_tried_again(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError

    os.kill(process_of(decoders), signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr("vitlab.serving.decoding._Decoder", fail)
        for _ in range(3):
            with pytest.raises(Refusal, match="not_ready"):
                decode(decoders, GOOD)
    assert decode(decoders, GOOD)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_image_that_takes_too_much_memory_is_refused(decoders: Decoders) -> None:
    large = encode(Image.new("RGB", (6000, 6000)))
    rule = Preprocess(image_size=(5000, 5000))  # 256 MB are not enough for that
    with pytest.raises(Refusal, match="costly_image"):
        decode(decoders, large, rule)
    assert decode(decoders, GOOD)


@pytest.mark.parametrize(
    ("data", "rule", "code"),
    [
        (b"", RULE, "bad_image"),
        (b"hello", RULE, "bad_image"),
        (GOOD[:-30], RULE, "bad_image"),
        (encode(Image.new("1", (8000, 6250))), RULE, "too_many_pixels"),
        (encode(Image.new("L", (1, 30_000))), Preprocess(image_size=(64, 64), resize="shorter-side"), "bad_shape"),
    ],
)
def test_reason_becomes_a_code_of_the_table(data: bytes, rule: Preprocess, code: str) -> None:
    assert _decoded(data, rule, whole=False) == b"-" + code.encode()
    assert _decoded(data, rule, whole=True) == b"-" + code.encode()


def test_codes_of_images_are_in_the_table() -> None:
    assert {code for _, code in _REASONS} < set(OF_IMAGES) <= set(PROBLEMS)


def test_photo_to_be_explained_survives_the_way() -> None:
    for rule in (RULE, Preprocess(mode="L", image_size=(8, 8), mean=(0.5,), std=(0.5,))):
        photo = see(GOOD, rule)
        again = unpack_photo(pack_photo(photo), rule)
        assert torch.equal(again.pixels_CYX, photo.pixels_CYX) and torch.equal(again.shown_CYX, photo.shown_CYX)
        assert again.size == photo.size
    with pytest.raises(FileProblem):
        see(b"no image", RULE)
