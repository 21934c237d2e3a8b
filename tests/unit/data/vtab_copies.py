"""Tiny copies of the fourteen raw sets behind VTAB's nineteen tasks, in the formats their makers publish.

Every image holds its own number in its set, so that a test can ask which image came out, and `lay` tells the label that each
number must have in each task: written down here from the definitions of the tasks, not with vitlab's own functions.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
from PIL import Image

Truth = dict[str, list[int]]  # task -> label by image number
Array = np.ndarray[Any, Any]


def picture(number: int, label: int) -> bytes:
    """A real image, in the format that is quickest to write: the number in its first pixel, the label as its grey."""
    pixels = np.full((8, 8, 3), label % 256, np.uint8)
    pixels[0, 0] = number // 256, number % 256, 0
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def number_in(image: bytes | Array) -> int:
    """Which image this is."""
    pixels = np.asarray(Image.open(io.BytesIO(image))) if isinstance(image, bytes) else image
    if pixels.shape[2] == 3:
        return int(pixels[0, 0, 0]) * 256 + int(pixels[0, 0, 1])
    first = pixels[0, :16, 0] > 127  # black and white: sixteen pixels are the number's bits
    return int(np.packbits(first).view(">u2")[0])


def _numbered(count: int, labels: list[int], rows: int, channels: int) -> Array:
    """Pixels [count, rows, rows, channels]: the number in the first pixel or the first bits, the label as grey below."""
    pixels = np.zeros((count, rows, rows, channels), np.uint8)
    pixels[:, rows // 2 :] = (np.array(labels) * 13 % 256).astype(np.uint8)[:, None, None, None]
    numbers = np.arange(count)
    if channels == 3:
        pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = numbers // 256, numbers % 256
    else:
        bits = np.unpackbits(numbers.astype(">u2").view(np.uint8).reshape(count, 2), axis=1)
        pixels[:, 0, :16, 0] = 255 * bits
    return pixels


def _write(root: Path, files: Mapping[str, str | bytes]) -> None:
    made = set[Path]()
    for name, data in files.items():
        path = root / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def caltech101(root: Path) -> Truth:
    """102 class folders of 31 images: 30 to train on, one to test on."""
    labels = [i // 31 for i in range(102 * 31)]
    files = {
        f"101_ObjectCategories/class{label:03d}/image_{i:04d}.png": picture(i, label) for i, label in enumerate(labels)
    }
    _write(root / "caltech101", files)
    return {"caltech101": labels}


def cifar100(root: Path) -> Truth:
    """Records of coarse label, fine label, and 32x32 pixels by channel."""
    labels = [i % 100 for i in range(2100)]
    pixels = _numbered(2100, labels, 32, 3).transpose(0, 3, 1, 2).reshape(2100, -1)
    head = np.array([[label % 20, label] for label in labels], np.uint8)
    records = np.concatenate([head, pixels], axis=1)
    folder = "cifar-100-binary"
    names = "\n".join(f"fine{i}" for i in range(100))
    _write(
        root / "cifar100",
        {
            f"{folder}/train.bin": records[:2000].tobytes(),
            f"{folder}/test.bin": records[2000:].tobytes(),
            f"{folder}/fine_label_names.txt": names,
        },
    )
    return {"cifar100": labels}


def _listed(count: Mapping[str, int]) -> dict[str, list[int]]:
    """Image numbers by part, in blocks."""
    firsts = np.cumsum([0, *count.values()]).tolist()
    return {part: list(range(firsts[k], firsts[k] + n)) for k, (part, n) in enumerate(count.items())}


def dtd(root: Path) -> Truth:
    parts = _listed({"train": 850, "val": 210, "test": 60})
    lines = {i: f"texture{i % 47:02d}/texture{i % 47:02d}_{i:04d}.jpg" for of in parts.values() for i in of}
    files: dict[str, str | bytes] = {f"dtd/images/{line}": picture(i, i % 47) for i, line in lines.items()}
    files |= {f"dtd/labels/{part}1.txt": "\n".join(lines[i] for i in of) for part, of in parts.items()}
    _write(root / "dtd", files)
    return {"dtd": [i % 47 for i in lines]}


def flowers102(root: Path) -> Truth:
    """Labels count from 1; one list of numbers from 1 for each part."""
    parts = _listed({"trnid": 850, "valid": 210, "tstid": 110})
    labels = [i % 102 for i in range(1170)]
    _write(root / "flowers102", {f"jpg/image_{i + 1:05d}.jpg": picture(i, label) for i, label in enumerate(labels)})
    scipy.io.savemat(root / "flowers102/imagelabels.mat", {"labels": np.array([labels]) + 1})
    chosen = {part: np.array([of]) + 1 for part, of in parts.items()}
    scipy.io.savemat(root / "flowers102/setid.mat", chosen)
    return {"flowers102": labels}


def oxford_pets(root: Path) -> Truth:
    labels = [i % 37 for i in range(1100)]
    stems = [f"breed{label:02d}_{i}" for i, label in enumerate(labels)]
    files: dict[str, str | bytes] = {f"images/{stem}.jpg": picture(i, labels[i]) for i, stem in enumerate(stems)}
    lines = [f"{stem} {label + 1} 1 1" for stem, label in zip(stems, labels, strict=True)]
    files |= {"annotations/trainval.txt": "\n".join(lines[:1040]), "annotations/test.txt": "\n".join(lines[1040:])}
    _write(root / "oxford_pets", files)
    return {"oxford-pets": labels}


def sun397(root: Path) -> Truth:
    """More classes than a thousand images can show: 1,000 of train and val have only the first 300."""
    parts = _listed({"tr": 850, "va": 210, "te": 397})
    labels = [i % 300 for i in range(1060)] + [i - 1060 for i in range(1060, 1457)]
    lines = [f"/s/scene{label:03d}/sun_{i:05d}.jpg" for i, label in enumerate(labels)]
    files: dict[str, str | bytes] = {f"SUN397{line}": picture(i, labels[i]) for i, line in enumerate(lines)}
    files |= {f"sun397_tfds_{word}.txt": "\n".join(lines[i] for i in of) for word, of in parts.items()}
    _write(root / "sun397", files)
    return {"sun397": labels}


def svhn(root: Path) -> Truth:
    """MATLAB files, image number last; the digit 0 is stored as 10."""
    labels = [i % 10 for i in range(2100)]
    pixels = _numbered(2100, labels, 32, 3).transpose(1, 2, 3, 0)
    stored = np.array([[label or 10] for label in labels], np.uint8)
    (root / "svhn").mkdir(parents=True)
    for part, of in (("train", slice(0, 2000)), ("test", slice(2000, 2100))):
        scipy.io.savemat(root / f"svhn/{part}_32x32.mat", {"X": pixels[..., of], "y": stored[of]})
    return {"svhn": labels}


def patch_camelyon(root: Path) -> Truth:
    import h5py

    labels = [i // 3 % 2 for i in range(1100)]
    pixels = _numbered(1100, labels, 16, 3)
    (root / "patch_camelyon").mkdir(parents=True)
    for word, of in (("train", slice(0, 850)), ("valid", slice(850, 1060)), ("test", slice(1060, 1100))):
        stem = root / f"patch_camelyon/camelyonpatch_level_2_split_{word}"
        with h5py.File(f"{stem}_x.h5", "w") as file:
            file["x"] = pixels[of]
        with h5py.File(f"{stem}_y.h5", "w") as file:
            file["y"] = np.array(labels[of], np.uint8).reshape(-1, 1, 1, 1)
    return {"patch-camelyon": labels}


def eurosat(root: Path) -> Truth:
    labels = [i % 10 for i in range(1500)]
    _write(
        root / "eurosat", {f"2750/Land{label}/Land{label}_{i}.jpg": picture(i, label) for i, label in enumerate(labels)}
    )
    return {"eurosat": labels}


def resisc45(root: Path) -> Truth:
    labels = [i % 45 for i in range(1530)]
    files = {
        f"NWPU-RESISC45/scene{label:02d}/scene{label:02d}_{i}.jpg": picture(i, label) for i, label in enumerate(labels)
    }
    _write(root / "resisc45", files)
    return {"resisc45": labels}


def retinopathy(root: Path) -> Truth:
    """Kaggle's test set is split by the board that an image counted for: the public one validates."""
    labels = [i % 5 for i in range(1120)]
    files: dict[str, str | bytes] = {
        f"{'train' if i < 850 else 'test'}/{i}_left.jpeg": picture(i, label) for i, label in enumerate(labels)
    }
    files["trainLabels.csv"] = "image,level\n" + "".join(f"{i}_left,{labels[i]}\n" for i in range(850))
    usage = ["Public" if i < 1060 else "Private" for i in range(850, 1120)]
    rows = "".join(f"{i}_left,{labels[i]},{usage[i - 850]}\n" for i in range(850, 1120))
    files["retinopathy_solution.csv"] = "image,level,Usage\n" + rows
    _write(root / "retinopathy", files)
    return {"retinopathy": labels}


def clevr(root: Path) -> Truth:
    """3 to 10 objects, and a nearest one between 7.75 and 10.75 away: in front of, on and behind every edge."""
    counts = [3 + i % 8 for i in range(2050)]
    nearest = [7.75 + 0.25 * (i % 13) for i in range(2050)]
    files: dict[str, str | bytes] = {}
    for part, numbers in (("train", range(2000)), ("val", range(2000, 2050))):
        scenes: list[dict[str, Any]] = []
        for i in numbers:
            name = f"CLEVR_{part}_{i:06d}.png"
            files[f"CLEVR_v1.0/images/{part}/{name}"] = picture(i, counts[i])
            depths = [nearest[i], *(20.0 for _ in range(counts[i] - 1))]
            objects = [{"pixel_coords": [0, 0, depth]} for depth in depths]
            scenes.append({"image_filename": name, "objects": objects})
        files[f"CLEVR_v1.0/scenes/CLEVR_{part}_scenes.json"] = json.dumps({"scenes": scenes})
    _write(root / "clevr", files)
    # Bins by hand: up to and with 8, 8.5, 9, 9.5, 10, and beyond.
    distance = [sum(value > edge for edge in (8, 8.5, 9, 9.5, 10)) for value in nearest]
    return {"clevr-count": [count - 3 for count in counts], "clevr-distance": distance}


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _tfrecord(filename: str, label: int, image: bytes) -> bytes:
    kinds = {
        "image": _field(1, _field(1, image)),
        "filename": _field(1, _field(1, filename.encode())),
        "label": _field(3, _field(1, _varint(label))),
    }
    body = _field(1, b"".join(_field(1, _field(1, name.encode()) + _field(2, kind)) for name, kind in kinds.items()))
    return len(body).to_bytes(8, "little") + b"crc!" + body + b"crc!"


def dmlab(root: Path) -> Truth:
    labels = [i % 6 for i in range(1120)]
    parts = _listed({"train": 850, "validation": 210, "test": 60})
    files = {
        f"dmlab-{word}.tfrecord": b"".join(_tfrecord(f"{i}.jpg", labels[i], picture(i, labels[i])) for i in of)
        for word, of in parts.items()
    }
    _write(root / "dmlab", {"dmlab-train.tfrecord": b"", **files})
    return {"dmlab": labels}


def dsprites(root: Path) -> Truth:
    """Images of zeros and ones, six factors each: the fourth is the orientation of 40, the fifth x of 32, the sixth y."""
    orientation = [i % 40 for i in range(2080)]
    x = [i // 3 % 32 for i in range(2080)]
    factors = np.zeros((2080, 6), np.int64)
    factors[:, 3], factors[:, 4], factors[:, 5] = orientation, x, 7
    images = _numbered(2080, [0] * 2080, 64, 1)[..., 0] // 255
    (root / "dsprites").mkdir(parents=True)
    name = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
    np.savez_compressed(root / "dsprites" / name, imgs=images, latents_classes=factors)
    # 32 places make 16 pairs; 40 angles make 16 groups of two and a half.
    return {
        "dsprites-location": [value // 2 for value in x],
        "dsprites-orientation": [value * 2 // 5 for value in orientation],
    }


def kitti(root: Path) -> Truth:
    """Twelve videos of 210 frames. A line per thing seen: its kind, and as the 14th number how far ahead it is."""
    count = 12 * 210
    seen = [None if i % 5 == 0 else float(i % 29) for i in range(count)]
    files: dict[str, str | bytes] = {
        "mapping/train_rand.txt": ",".join(str(i + 1) for i in range(count)),
        "mapping/train_mapping.txt": "\n".join(f"2011_09_26 drive_{i // 210:04d} {i:010d}" for i in range(count)),
    }
    for i, z in enumerate(seen):
        files[f"training/image_2/{i:06d}.png"] = picture(i, i % 7)
        rows = [("Pedestrian", 1.0), *([("Car", z), ("Van", z + 3)] if z is not None else [])]
        files[f"training/label_2/{i:06d}.txt"] = "".join(
            f"{kind} 0.00 0 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.9 -2.0 1.7 {far} -1.6\n" for kind, far in rows
        )
    _write(root / "kitti", files)
    # Up to 8 metres, up to 20, beyond, and no vehicle at all: people do not count.
    return {"kitti-distance": [3 if z is None else (z > 8) + (z > 20) for z in seen]}


def smallnorb(root: Path) -> Truth:
    """Pairs of pictures; instance, elevation 0 to 8, azimuth 0, 2 … 34 and lighting are reported in a second file."""
    count = 1320
    elevation, azimuth = [i % 9 for i in range(count)], [i % 18 for i in range(count)]
    pixels = np.zeros((count, 2, 96, 96), np.uint8)
    pixels[:, 0] = _numbered(count, azimuth, 96, 1)[..., 0]
    reported = np.array([[4, e, 2 * a, 0] for e, a in zip(elevation, azimuth, strict=True)], np.int32)
    (root / "smallnorb").mkdir(parents=True)
    parts = (("46789", "training", slice(0, 850)), ("01235", "testing", slice(850, count)))
    for who, word, of in parts:
        for kind, array in (("dat", pixels[of]), ("info", reported[of])):
            magic = {"uint8": 507333717, "int32": 507333716}[str(array.dtype)]
            head = np.array([magic, array.ndim, *array.shape, *[1] * (3 - array.ndim)], "<i4").tobytes()
            path = root / f"smallnorb/smallnorb-5x{who}x9x18x6x2x96x96-{word}-{kind}.mat"
            path.write_bytes(head + array.tobytes())
    return {"smallnorb-azimuth": azimuth, "smallnorb-elevation": elevation}


SETS: dict[str, Callable[[Path], Truth]] = {
    function.__name__: function
    for function in (
        *(caltech101, cifar100, dtd, flowers102, oxford_pets, sun397, svhn, patch_camelyon, eurosat, resisc45),
        *(retinopathy, clevr, dmlab, dsprites, kitti, smallnorb),
    )
}
