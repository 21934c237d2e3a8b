"""Damaged images and tampered bundles end in one kind of error, whatever was done to them."""

import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitlab.core.errors import FileProblem, VitlabError
from vitlab.data.decode import decode
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle


def images() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    encoded = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, format=kind)
        encoded.append(buffer.getvalue())
    return encoded


IMAGES = images()
damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6)


@given(st.sampled_from(IMAGES), damage, st.floats(0.2, 1))
def test_damaged_image_is_a_picture_or_one_error(whole: bytes, changes: list[tuple[float, int]], kept: float) -> None:
    raw = bytearray(whole[: max(1, int(len(whole) * kept))])
    for place, value in changes:
        raw[int(place * len(raw))] = value
    try:
        out = decode(bytes(raw), "RGB")
    except FileProblem as error:
        assert "0x" not in str(error)
    else:
        assert out.dtype == torch.uint8
        assert out.shape[0] == 3


@given(st.binary(max_size=200))
def test_any_bytes_are_a_picture_or_one_error(raw: bytes) -> None:
    try:
        decode(raw, "L")
    except FileProblem as error:
        assert "0x" not in str(error)


def small_bundle() -> dict[str, bytes]:
    model = create_model("ViT-w8d1m8h2/4", num_classes=2, image_size=8, in_channels=3, seed=0)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "bundle"
        save_bundle(path, Bundle(model, Preprocess(image_size=(8, 8)), ("a", "b"), "card", {"format": "x"}))
        return {file.name: file.read_bytes() for file in path.iterdir()}


FILES = small_bundle()
JSON_FILES = ["config.json", "preprocess.json", "labels.json", "manifest.json"]
odd_values = st.sampled_from(
    [None, [], {}, "", "x", -1, 0, 1, 3.5, True, 10**400, [[]], {"a": 1}, "none", float("nan"), "\x00", [1, 2, 3], 64]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON document, the document itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@given(st.sampled_from(JSON_FILES), odd_values, st.data())
def test_tampered_json_loads_or_ends_in_a_vitlab_error(name: str, value: Any, data: st.DataObject) -> None:
    document = json.loads(FILES[name])
    place = data.draw(st.sampled_from(places(document)))
    read_tampered({**FILES, name: json.dumps(replaced(document, place, value)).encode()}, mend=name != "manifest.json")


@given(st.binary(max_size=64), st.floats(0, 1))
def test_tampered_weights_load_or_end_in_a_vitlab_error(noise: bytes, place: float) -> None:
    whole = FILES["model.safetensors"]
    at = int(place * len(whole))
    read_tampered({**FILES, "model.safetensors": whole[:at] + noise + whole[at + len(noise) :]}, mend=True)


def read_tampered(files: dict[str, bytes], *, mend: bool) -> None:
    """Reads the files as a bundle, with a fitting manifest if `mend`; anything but success and VitlabError escapes."""
    if mend:
        hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items() if name != "manifest.json"}
        files = {**files, "manifest.json": json.dumps({"sha256": hashes}).encode()}
    with tempfile.TemporaryDirectory() as place:
        for name, raw in files.items():
            (Path(place) / name).write_bytes(raw)
        try:
            read_bundle(Path(place))
        except VitlabError as error:
            assert str(error)
