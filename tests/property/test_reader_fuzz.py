"""Every reader of files that others wrote, with inputs that know its format: read, or refused by one error of ours.

What the numbers in a weights file must be, others can judge; that is in `test_container_fuzz.py`.
"""

import contextlib
import csv
import functools
import hashlib
import io
import json
import math
import random
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from fuzzing import NUMBERS, ODD, Files, Reader, damaged, hold, limits_only, odd_json
from PIL import Image
from slow_cases import slow_after
from test_container_fuzz import SEEDS, draw_file

import vitlab
import vitlab.data.decode
import vitlab.data.preprocess
import vitlab.data.rules
from vitlab.core.console import Console
from vitlab.core.errors import VitlabError
from vitlab.data.decode import decode, read
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.shard_writing import write_shards
from vitlab.models.build import create_model
from vitlab.models.families import spec_from_dict
from vitlab.models.lora import LoraRule, add_lora, lora_state
from vitlab.weights.adapter import Adapter, save_adapter
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.containers import read_arrays
from vitlab.weights.hashing import hash_weights
from vitlab.weights.targets import write_foreign

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
Draw = random.Random


def encoded(kind: str, pixels: Any = PIXELS, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind, **options)
    return buffer.getvalue()


PNG = encoded("PNG")


@functools.cache
def folder_of(write: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as place:
        write(Path(place) / "x")
        return {path.name: path.read_bytes() for path in (Path(place) / "x").iterdir()}


# --- models -----------------------------------------------------------------------------------------------------------


def small_bundle(**changes: Any) -> Bundle:
    model = create_model("ViT-w64d1m64h2/8", num_classes=3, image_size=16, seed=0, overrides=changes)
    return Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee", "cat"), "card", {"format": "vitlab"}, 1.5)


def write_bundle(path: Path) -> None:
    save_bundle(path, small_bundle())


def write_unplaced(path: Path) -> None:
    """Without positions, so that no weight bounds the image size; with thresholds."""
    bundle = small_bundle(pos="none", pool="gap")
    save_bundle(path, Bundle(bundle.model, bundle.preprocess, bundle.labels, "", {}, thresholds=(0.0, 0.5, 1.0)))


def write_bit(path: Path) -> None:
    spec = spec_from_dict(
        {"kind": "bit", "trunk": {"stages": [1], "preact": True}, "image_size": [16, 16], "num_classes": 2}
    )
    save_bundle(path, Bundle(create_model(spec, seed=0), Preprocess(image_size=(16, 16)), ("a", "b"), "", {}))


def write_efficientnet(path: Path) -> None:
    sizes = {"stem_width": 4, "widths": [4] * 7, "depths": [1] * 7, "last_width": 8}
    spec = spec_from_dict({"kind": "efficientnet", **sizes, "image_size": [16, 16], "num_classes": 2})
    save_bundle(path, Bundle(create_model(spec, seed=0), Preprocess(image_size=(16, 16)), ("a", "b"), "", {}))


def write_hf(path: Path) -> None:
    write_foreign(small_bundle(), path, "hf")


def write_timm(path: Path) -> None:
    write_foreign(small_bundle(), path, "timm")


def write_adapter(path: Path) -> None:
    bundle, rule = small_bundle(), LoraRule(rank=2)
    base = hash_weights(bundle.model)
    add_lora(bundle.model, rule, seed=0)
    state = lora_state(bundle.model)
    spec, labels = bundle.model.spec, bundle.labels
    save_adapter(path, Adapter(rule, state, "base", base, spec, bundle.preprocess, labels, "card", (0.0, 0.0, 0.0)))


def damaged_folder(files: Files, draw: Draw) -> Files:
    """One file of it damaged as its kind can be, more often than not with a manifest that fits."""
    documents = [name for name in files if name.endswith(".json")]
    name = draw.choice(documents) if draw.random() < 0.85 else draw.choice(list(files))
    new = odd_json(json.loads(files[name]), draw) if name in documents else damaged(files[name], draw)
    files = {**files, name: new}
    if "manifest.json" in files and name != "manifest.json" and draw.random() < 0.95:
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != "manifest.json"}
        files["manifest.json"] = json.dumps({"sha256": hashes}).encode()
    return files


def use_model(folder: Path) -> None:
    """Loaded, and asked about one image where that image is small."""
    classifier = vitlab.load(folder, quiet=True, device="cpu")
    if math.prod(classifier.preprocess.image_size) <= 64**2:
        read(PNG, classifier.preprocess)
        if classifier.preprocess.mode != "array":
            (classifier if classifier.labels else classifier.embed)([PNG])


def make_bundle(draw: Draw) -> Files:
    return damaged_folder(folder_of(draw.choice((write_bundle, write_unplaced, write_bit, write_efficientnet))), draw)


def make_hf(draw: Draw) -> Files:
    files = folder_of(write_hf)
    if draw.random() < 0.2:  # as several files
        index = {
            "metadata": {"total_size": 1},
            "weight_map": {"classifier.weight": "a.safetensors", "x": "b.safetensors"},
        }
        files = {**files, "model.safetensors.index.json": json.dumps(index).encode()}
        files["a.safetensors"] = files["b.safetensors"] = files.pop("model.safetensors")
    files = {name: data for name, data in files.items() if name != "manifest.json"}
    return damaged_folder(files, draw)


def make_timm(draw: Draw) -> Files:
    return damaged_folder({name: data for name, data in folder_of(write_timm).items() if name != "manifest.json"}, draw)


def make_adapter(draw: Draw) -> Files:
    about = damaged_folder(folder_of(write_adapter), draw)
    return {f"adapter/{name}": data for name, data in about.items()} | {
        f"base/{name}": data for name, data in folder_of(write_bundle).items()
    }


def use_adapter(folder: Path) -> None:
    classifier = vitlab.load(folder / "base", adapter=folder / "adapter", quiet=True, device="cpu")
    if math.prod(classifier.preprocess.image_size) <= 64**2 and classifier.preprocess.mode != "array":
        classifier.embed([PNG])


def make_weights(draw: Draw) -> Files:
    return {"weights": draw_file(draw.choice(list(SEEDS)), draw)}


# --- packed archives --------------------------------------------------------------------------------------------------

NPY_WORDS = [
    *(
        b"'",
        b"(",
        b")",
        b",",
        b"}",
        b"{",
        b"-",
        b"9" * 30,
        b"L",
        b"None",
        b"True",
        b"|O",
        b"<U99",
        b">i8",
        b"\\x",
        b"0x",
    ),
    *(b"(((", b"**", b"[0]", b"f''", b"\n", b"<f8", b"|V9", b"<M8[s]", b"1e5", b"descr", b"shape", b"'a'.b", b"\x00"),
]
HEADERS = [
    "{'descr': '<i8', 'fortran_order': False, 'shape': (%s,), }",
    "{'descr': %s, 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '<i8'), ('b', %s)], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '|u1', 'fortran_order': %s, 'shape': (3,), }",
    "{'descr': '|u1', 'fortran_order': True, 'shape': %s, }",
    "%s",
]
SAID = [
    "3",
    "-1",
    "10**9",
    "2**62",
    "1.5",
    "'|O'",
    "'<U1000000000'",
    "None",
    "3,4",
    "(3)",
    "a.b",
    "'<i8\\x00'",
    "{}",
    "1L",
    "((" * 50,
]


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return buffer.getvalue()


def odd_npy(draw: Draw, old: bytes) -> bytes:
    match draw.randrange(4):
        case 0:
            return damaged(old, draw, NPY_WORDS)
        case 1:  # a header of our own, in a version of its own, before the old numbers
            text = (draw.choice(HEADERS) % draw.choice(SAID)).encode() + b"\n"
            version = draw.choice((1, 1, 1, 2, 3, 9))
            length = draw.choice((len(text), len(text), draw.choice(NUMBERS)))
            size = 2 if version == 1 else 4
            start = b"\x93NUMPY" + bytes((version, 0)) + (length % 256**size).to_bytes(size, "little")
            return start + text + old[-50:]
        case 2:
            kinds = ["<i8", "<u8", "<f8", "<f2", "|b1", "|u1", "<U3", "|S3", "<c8", ">i4", "|V4", "<M8[s]", "<i2"]
            shape = draw.choice(((), (0,), (1,), (3,), (4,), (2, 2), (3, 1), (5,), (1, 1, 1, 1)))
            numbers = np.array(draw.choices([0, 1, 2, 5, -1, 100], k=math.prod(shape))).reshape(shape)
            return npy(numbers.astype(draw.choice(kinds)))
        case _:
            return npy(np.array(draw.choices([str(word) for word in ODD if isinstance(word, str)], k=3)))


def make_packed(draw: Draw) -> Files:
    images = [PNG, encoded("JPEG"), b"no image"]
    arrays: dict[str, Any] = {
        "data": np.frombuffer(b"".join(images), np.uint8),
        "offsets": np.cumsum([0, *map(len, images)]),
        "labels": np.array([1, 0, 1], np.int16),
        "names": np.array(["a.png", "b.png", "ü.png"]),
        "classes": np.array(["cat", "dog"]),
    }
    members = {f"{name}.npy": npy(array) for name, array in arrays.items()}
    if draw.random() < 0.75:
        for name in draw.sample(list(members), draw.choice((1, 1, 2))):
            members[name] = odd_npy(draw, members[name])
    buffer = io.BytesIO()
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
        if draw.random() < 0.05:
            archive.writestr("bomb.npy", bytes(10**6))
    data = buffer.getvalue()
    if draw.random() < 0.5:
        data = damaged(data, draw, [b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b".npy"])
    return {"set.npz": data}


def use_data(path: Path) -> None:
    """Opened, and the first images of every part read and decoded."""
    for dataset in open_data(path, console=Console(quiet=True)).parts.values():
        dataset.fingerprint()
        for i in range(min(3, len(dataset))):
            # An image that cannot be read is counted and left out by everybody who reads many.
            with contextlib.suppress(VitlabError, OSError):
                decode(dataset.read(i), "RGB")


# --- tables -----------------------------------------------------------------------------------------------------------

CELLS = [
    *(str(value) for value in ODD),
    "a.png",
    "b.png",
    "x/c.png",
    "cat",
    "dog",
    "cat;dog",
    "train",
    "test",
    "val",
    '"',
    '""',
]


def table_rows(draw: Draw) -> list[list[str]]:
    rows = [["path", "label", "split", "group"], ["a.png", "cat", "train", "1"], ["b.png", "dog", "test", "2"]]
    width = draw.choice((2, 2, 3, 4))
    rows = [row[:width] for row in rows]
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        row = draw.choice(rows)
        match draw.randrange(5):
            case 0:
                row.insert(draw.randrange(len(row) + 1), draw.choice(CELLS))
            case 1 if row:
                row.pop(draw.randrange(len(row)))
            case 2:
                rows.append(draw.choices(CELLS, k=draw.choice((0, 1, width, width + 1))))
            case _ if row:
                row[draw.randrange(len(row))] = draw.choice(CELLS)
    return rows


def make_csv(draw: Draw) -> Files:
    text = io.StringIO()
    out = csv.writer(
        text, delimiter=draw.choice(",,,;\t"), quoting=draw.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)), escapechar="\\"
    )
    out.writerows(table_rows(draw))
    data = text.getvalue().encode(draw.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")), "replace")
    if draw.random() < 0.5:
        data = damaged(
            data, draw, [b'"', b"\r", b"\n", b"\x00", b",", b";", b"\t", b"\xff\xfe", b'"\n', b"a" * 200_000]
        )
    return {"set.csv": data, "a.png": PNG, "b.png": PNG}


COLUMNS: list[Callable[[Draw], Any]] = [
    lambda _: arrow.array(["a.png", "b.png"]),
    lambda _: arrow.array(["cat", None]),
    lambda _: arrow.array([1.0, None]),
    lambda _: arrow.array([float("nan"), float("inf")]),
    lambda _: arrow.array([2**63, 0], arrow.uint64()),
    lambda _: arrow.array([["cat", "dog"], None]),
    lambda _: arrow.array([["cat", None], []]),
    lambda _: arrow.array([[[1]], []]),
    lambda _: arrow.array([{"bytes": PNG, "path": "a"}, None]),
    lambda _: arrow.array([b"\xff\x00", b""]),
    lambda _: arrow.array([True, None]),
    lambda draw: arrow.array(
        [0, 2**40], arrow.timestamp(draw.choice(("s", "ns")), draw.choice((None, "UTC", "Mars/X")))
    ),
    lambda _: arrow.array([-(2**62), 2**62], arrow.timestamp("s")),
    lambda _: arrow.array([1, 2], arrow.date32()),
    lambda _: arrow.array([2**40, -5], arrow.duration("s")),
    lambda _: arrow.array(["a", "b"]).dictionary_encode(),
    lambda _: arrow.array([[("a", 1)], []], arrow.map_(arrow.string(), arrow.int64())),
    lambda _: arrow.nulls(2),
    lambda draw: arrow.array(draw.choices([str(odd).encode("utf-8", "replace").decode() for odd in ODD], k=2)),
]


def make_parquet(draw: Draw) -> Files:
    names = draw.choice(
        (["path", "label"], ["path", "label", "split"], ["label", "path", "group"], ["path", "path"], ["x"])
    )
    plain = {"path": COLUMNS[0], "label": COLUMNS[0], "split": lambda _: arrow.array(["train", "test"])}
    columns = [plain[name] if name in plain and draw.random() < 0.6 else draw.choice(COLUMNS) for name in names]
    buffer = io.BytesIO()
    try:
        table = arrow.table([column(draw) for column in columns], names=names)
        parquet.write_table(table, buffer, compression=draw.choice(("none", "snappy", "zstd", "gzip")))
    except arrow.ArrowException:  # a column of a type that parquet has not
        parquet.write_table(arrow.table({"path": ["a.png"], "label": ["x"]}), buffer)
    data = buffer.getvalue()
    if draw.random() < 0.5:
        data = damaged(
            data, draw, [b"PAR1", b"\x15\x00", b"\x19\x1c", b"\xff\xff\xff\x7f", b"\x26\xfe\xff\xff\xff\x0f"]
        )
    return {"set.parquet": data, "a.png": PNG, "b.png": PNG}


# --- shards -----------------------------------------------------------------------------------------------------------


def tar_of(files: Files, form: int = tarfile.USTAR_FORMAT, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_number(number: int, width: int, draw: Draw) -> bytes:
    """As octal text, or in base 256, which has no bound that anybody checks."""
    if draw.random() < 0.5:
        return (b"%0*o" % (width - 1, abs(number)))[: width - 1] + b"\0"
    raw = (number % 256 ** (width - 1)).to_bytes(width - 1, "big")
    return bytes([0xFF if number < 0 else 0x80]) + raw


def odd_header(data: bytearray, draw: Draw) -> None:
    """One field of one header, with a checksum that fits again."""
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    at = draw.choice(starts)
    match draw.randrange(6):
        case 0 | 1:
            number = draw.choice([*NUMBERS, -1, -512, 10**9, 8**11 - 1, 2**80])
            field, width = draw.choice(((124, 12), (124, 12), (124, 12), (136, 12), (100, 8), (329, 8)))
            data[at + field : at + field + width] = tar_number(number, width, draw)
        case 2:
            data[at + 156] = draw.choice(b"01234567LKSxgXDMNV\0A")
        case 3:
            word = draw.choice(
                (b"a.png", b"b.cls", b"../a.png", b"/a.png", b"\xff\xfe.png", b"\x1b[31m.txt", b"a/", b".", b"")
            )
            data[at : at + 100] = word.ljust(100, b"\0")
        case 4:
            offset = draw.choice((257, 345, 386, 482, 483))
            data[at + offset : at + offset + 12] = draw.randbytes(12)
        case _:
            data[at + draw.randrange(512)] = draw.randrange(256)
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def pax_of(draw: Draw) -> dict[str, str]:
    keys = ["size", "path", "mtime", "GNU.sparse.size", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.minor", "uid"]
    keys += [
        "GNU.sparse.name",
        "GNU.sparse.realsize",
        "GNU.sparse.offset",
        "GNU.sparse.numblocks",
        "hdrcharset",
        "comment",
    ]
    values = [
        "0",
        "1",
        "-1",
        str(2**63),
        str(10**30),
        "9" * 4000,
        "x",
        "a.png",
        "0,1,2",
        "1,2,3,4",
        "1e9",
        "nan",
        "",
        "BINARY",
    ]
    return {draw.choice(keys): draw.choice(values) for _ in range(draw.choice((1, 2, 3)))}


def make_tar(draw: Draw) -> Files:
    labels = {".cls": b"1", ".txt": b"cat", ".json": b'{"label": "cat", "group": "g"}'}
    kind = draw.choice(list(labels))
    label = labels[kind]
    if kind == ".json" and draw.random() < 0.5:
        label = odd_json({"label": ["cat", 2], "group": 1}, draw)
    elif draw.random() < 0.2:
        label = str(draw.choice(ODD)).encode("utf-8", "surrogatepass")
    files = {"a.png": PNG, f"a{kind}": label, "x/b.jpg": PNG, "x/b.cls": b"0"}
    if draw.random() < 0.3:
        form = draw.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
        options = {"pax_headers": pax_of(draw)} if form == tarfile.PAX_FORMAT else {}
        files = {name if draw.random() < 0.8 else "é" * 80 + name: data for name, data in files.items()}
        data = bytearray(tar_of(files, form, **options))
    else:
        data = bytearray(tar_of(files))
    for _ in range(draw.choice((0, 1, 1, 2))):
        odd_header(data, draw)
    return {"set.tar": damaged(bytes(data), draw) if draw.random() < 0.2 else bytes(data)}


def write_indexed(path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        for label in ("cat", "dog"):
            (Path(place) / label).mkdir()
            for number in range(2):
                (Path(place) / label / f"{number}.png").write_bytes(PNG)
        write_shards(open_data(place), path, per_shard=3, workers=1, advance=lambda *_: None)


def make_index(draw: Draw) -> Files:
    files = {name: data for name, data in folder_of(write_indexed).items() if name != ".lock"}
    files["index.json"] = odd_json(json.loads(files["index.json"]), draw)
    if draw.random() < 0.5:
        del files["SHA256SUMS"]
    else:
        files["SHA256SUMS"] = f"{hashlib.sha256(files['index.json']).hexdigest()}  index.json\n".encode()
    return files


# --- images -----------------------------------------------------------------------------------------------------------

GREY = np.arange(117, dtype=np.uint16).reshape(9, 13) * 500
RGBA = np.dstack([PIXELS, PIXELS[:, :, :1]])
IMAGES = [
    *(encoded("JPEG"), encoded("JPEG", progressive=True), encoded("JPEG", PIXELS[:, :, 0]), PNG, encoded("PNG", GREY)),
    *(encoded("PNG", RGBA), encoded("WEBP"), encoded("WEBP", RGBA, lossless=True), encoded("GIF"), encoded("BMP")),
    *(
        encoded("TIFF"),
        encoded("TIFF", GREY),
        encoded("TIFF", compression="tiff_lzw"),
        encoded("TIFF", compression="tiff_deflate"),
    ),
    encoded("TIFF", np.linspace(0, 2, 117, dtype=np.float32).reshape(9, 13)),
    encoded("JPEG", exif=(lambda exif: exif.__setitem__(0x0112, 6) or exif)(Image.Exif())),
]


def odd_png(data: bytes, draw: Draw) -> bytes:
    """A chunk changed, doubled, gone or moved, each with a checksum that fits."""
    chunks, at = [], 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    i = draw.randrange(len(chunks))
    kind, body = chunks[i]
    match draw.randrange(5):
        case 0:
            chunks[i] = (kind, damaged(body, draw))
        case 1:
            chunks.insert(draw.randrange(len(chunks)), (kind, body))
        case 2:
            del chunks[i]
        case 3:
            word = draw.choice(
                (b"tRNS", b"PLTE", b"iCCP", b"eXIf", b"zTXt", b"iTXt", b"acTL", b"fcTL", b"fdAT", b"gAMA")
            )
            text = draw.choice(
                (b"", b"x\0\0" + zlib.compress(bytes(10**6)), draw.randbytes(30), b"II*\0" + draw.randbytes(60))
            )
            chunks.insert(draw.randrange(1, len(chunks) + 1), (word, text))
        case _:
            head = bytearray(chunks[0][1].ljust(13, b"\0"))
            struct.pack_into(">I", head, draw.choice((0, 4)), draw.choice(NUMBERS) % 2**32)
            head[8 + draw.randrange(5)] = draw.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
            chunks[0] = (b"IHDR", bytes(head))
    packed = (struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return data[:8] + b"".join(packed)


def make_image(draw: Draw) -> Files:
    data = draw.choice(IMAGES)
    if draw.random() < 0.05:
        return {"image": data[: draw.choice((0, 2, 8, 30))] + draw.randbytes(draw.choice((0, 1, 200)))}
    if data.startswith(b"\x89PNG") and draw.random() < 0.7:
        data = odd_png(data, draw)
    else:
        data = damaged(
            data, draw, [b"\xff\xda", b"\xff\xc0", b"\xff\xc2", b"\xff\xd8", b"Exif\0\0", b"RIFF", b"VP8X", b"GIF89a"]
        )
    return {"image": data}


RULES = [
    Preprocess(image_size=(8, 8)),
    Preprocess(image_size=(8, 8), resize="shorter-side", crop_frac=0.5, filter="bicubic"),
    Preprocess(image_size=(4, 4), mode="L", filter="area", mean=(0.5,), std=(0.5,)),
]


def use_image(folder: Path) -> None:
    for rule in RULES:
        assert read(folder / "image", rule).dtype == torch.uint8


READERS = {
    "weights": (make_weights, lambda folder: read_arrays(folder / "weights"), 300),
    "bundle": (make_bundle, use_model, 150),
    "adapter": (make_adapter, use_adapter, 60),
    "packed": (make_packed, lambda folder: use_data(folder / "set.npz"), 250),
    "csv": (make_csv, lambda folder: use_data(folder / "set.csv"), 300),
    "parquet": (make_parquet, lambda folder: use_data(folder / "set.parquet"), 150),
    "tar": (make_tar, lambda folder: use_data(folder / "set.tar"), 300),
    "index": (make_index, use_data, 250),
    "image": (make_image, use_image, 300),
    "hf-folder": (make_hf, use_model, 100),
    "timm-folder": (make_timm, use_model, 100),
}


@limits_only
@pytest.mark.parametrize("name", slow_after(len(READERS) - 2, READERS))
def test_what_others_wrote_is_read_or_refused_in_bounded_time_and_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (
        vitlab.data.decode,
        vitlab.data.preprocess,
        vitlab.data.rules,
    ):  # a sound image of more pixels takes more memory by right
        monkeypatch.setattr(module, "MAX_PIXELS", 4_000_000)
    make, use, count = READERS[name]
    hold(Reader(name, make, use), count)
