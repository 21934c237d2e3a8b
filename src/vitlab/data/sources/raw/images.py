"""Layouts of published sets of image files: their parts and labels.

One function per set. Keys are the names that TensorFlow Datasets gives the same images, because VTAB takes its thousand images
by the order of these names (`data/sources/vtab.py`).
"""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem, amount
from vitlab.data.dataset import Dataset, Opened, several_labels
from vitlab.data.sources.folders import SUFFIXES
from vitlab.data.sources.raw.binary import mat_arrays
from vitlab.data.sources.raw.files import RawFiles, take_parts
from vitlab.data.sources.synsets import ilsvrc_synsets

# --- images with lists -------------------------------------------------------------------------------------------------


def oxford_pets(files: RawFiles) -> Opened:
    """The lists have a line per image: name, class from 1, species, breed."""
    rows = {
        part: [line.split() for line in files.lines(f"annotations/{word}.txt") if line[0] != "#"]
        for part, word in (("train", "trainval"), ("test", "test"))
    }
    numbers: dict[int, str] = {}
    for row in (row for of in rows.values() for row in of):
        if len(row) != 4 or not row[1].isdecimal() or "/" in row[0]:
            raise FileProblem(f"{files.root}: the line {' '.join(row)!r:.60} of an image list cannot be read")
        numbers.setdefault(int(row[1]), row[0].rpartition("_")[0])
    if not numbers or sorted(numbers) != list(range(1, len(numbers) + 1)):
        raise FileProblem(f"{files.root}: the class numbers have gaps: {sorted(numbers)[:5]} …")
    classes = [numbers[i] for i in sorted(numbers)]
    images = {
        part: [(f"{row[0]}.jpg", f"images/{row[0]}.jpg", int(row[1]) - 1) for row in of] for part, of in rows.items()
    }
    return Opened({part: files.part(part, classes, of) for part, of in images.items()})


def flowers102(files: RawFiles) -> Opened:
    """The published labels are numbers from 1, without names."""
    labels = mat_arrays(files.read("imagelabels.mat"), "imagelabels.mat").get("labels")
    chosen = mat_arrays(files.read("setid.mat"), "setid.mat")
    parts: dict[str, Dataset] = {}
    for part, word in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        if labels is None or word not in chosen:
            raise FileProblem(f"{files.root}: imagelabels.mat or setid.mat lacks what it should hold")
        numbers = chosen[word].ravel().astype(int)
        if len(numbers) == 0 or numbers.min() < 1 or numbers.max() > labels.size:
            raise FileProblem(f"{files.root}: setid.mat names images that have no label")
        values = (labels.ravel()[numbers - 1].astype(int) - 1).tolist()
        classes = [str(i) for i in range(1, int(labels.max()) + 1)]
        keys = [f"image_{i:05d}.jpg" for i in numbers]
        parts[part] = files.part(part, classes, zip(keys, keys, values, strict=True))
    return Opened(parts)


def dtd(files: RawFiles) -> Opened:
    """The first of ten official splits, as everybody reports."""
    lists = {part: files.lines(f"labels/{part}1.txt") for part in ("train", "val", "test")}
    return Opened(_by_lists(files, lists, "images/"))


def sun397(files: RawFiles) -> Opened:
    """The random split of TensorFlow Datasets, which VTAB uses."""
    lists = {part: files.lines(f"sun397_tfds_{part[:2]}.txt") for part in ("train", "val", "test")}
    note = "TensorFlow Datasets shrinks these images to 120,000 pixels and re-encodes them; here they are as published"
    return Opened(_by_lists(files, lists, "SUN397"), (note,))


def _by_lists(files: RawFiles, lists: Mapping[str, Sequence[str]], prefix: str) -> dict[str, Dataset]:
    """Lists of `class/file`; whatever stands before the last slash is the class."""
    classes = sorted({line.rpartition("/")[0] for lines in lists.values() for line in lines})
    number = {name: i for i, name in enumerate(classes)}
    return {
        part: files.part(part, classes, [(line, prefix + line, number[line.rpartition("/")[0]]) for line in lines])
        for part, lines in lists.items()
    }


def retinopathy(files: RawFiles) -> Opened:
    """Kaggle's training set, and its test set: the public board's images validate."""
    train = [(row["image"], row["level"]) for row in _table(files, "trainLabels.csv", ("image", "level"))]
    solution = _table(files, "retinopathy_solution.csv", ("image", "level", "Usage"))
    lists = {
        "train": ("train", train),
        "val": ("test", [(row["image"], row["level"]) for row in solution if row["Usage"] == "Public"]),
        "test": ("test", [(row["image"], row["level"]) for row in solution if row["Usage"] == "Private"]),
    }
    classes = ("none", "mild", "moderate", "severe", "proliferative")
    parts: dict[str, Dataset] = {}
    for part, (folder, rows) in lists.items():
        if not all(level in "01234" and len(level) == 1 for _, level in rows):
            raise FileProblem(f"{files.root}: the labels of {part} are not 0 to 4")
        images = [(name, f"{folder}/{name}.jpeg", int(level)) for name, level in rows]
        parts[part] = files.part(part, classes, images)
    note = "VTAB uses images with the eye scaled to 300 pixels and the local average subtracted; these are as published"
    return Opened(parts, (note,))


def _table(files: RawFiles, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(files.text(name))))
    if not rows or not all(isinstance(row.get(column), str) for row in rows for column in columns):
        raise FileProblem(f"{files.root}: {name} needs the columns {', '.join(columns)}")
    return rows


def tiny_imagenet(files: RawFiles) -> Opened:
    """200 of ImageNet's classes at 64x64; the test part has no labels."""
    words = dict(line.split("\t", 1) for line in files.lines("words.txt") if "\t" in line)
    wnids = sorted(files.lines("wnids.txt"))
    classes = [f"{wnid}|{words[wnid]}" if wnid in words else wnid for wnid in wnids]
    number = {wnid: i for i, wnid in enumerate(wnids)}
    images = [(key, full, key.split("/")[0]) for key, full in files.below("train").items()]
    train = [(key, full, number[wnid]) for key, full, wnid in images if wnid in number]
    rows = [line.split("\t") for line in files.lines("val/val_annotations.txt")]
    if not all(len(row) > 1 and row[1] in number for row in rows):
        raise FileProblem(f"{files.root}: val_annotations.txt names a class that wnids.txt does not have")
    val = [(row[0], f"val/images/{row[0]}", number[row[1]]) for row in rows]
    return Opened({"train": files.part("train", classes, train), "val": files.part("val", classes, val)})


# --- class folders -----------------------------------------------------------------------------------------------------


def class_folders(files: RawFiles) -> Opened:
    """Every image under the folder it lies in; nothing is split."""
    files_by_key: dict[str, str] = {}
    for full in sorted(files.places):
        folder, _, name = full.rpartition("/")
        if folder and name.lower().endswith(SUFFIXES):
            files_by_key.setdefault(f"{folder.rpartition('/')[2]}/{name}", full)
    if not files_by_key:
        raise FileProblem(f"{files.root} holds no images in class folders")
    classes = sorted({key.partition("/")[0] for key in files_by_key}, key=str.lower)
    return Opened({"all": _by_folder(files, "all", classes, files_by_key)})


def _by_folder(files: RawFiles, part: str, classes: Sequence[str], files_by_key: Mapping[str, str]) -> Dataset:
    """Images by `class/file`."""
    number = {name: i for i, name in enumerate(classes)}
    return files.part(part, classes, [(key, full, number[key.partition("/")[0]]) for key, full in files_by_key.items()])


_CALTECH_TRAIN = 30  # images of each class; everybody's protocol for this set


def caltech101(files: RawFiles) -> Opened:
    """Thirty random images of each class train, the others test.

    There is no official draw: this one is from sorted names with TensorFlow Datasets' seed, whose own draw depends on the disk.
    """
    everything = class_folders(files).part("all")
    labels = everything.labels.single().numpy()
    draw = np.random.RandomState(1234)
    chosen: list[int] = []
    for label in range(len(everything.classes)):
        members = np.flatnonzero(labels == label)
        if len(members) <= _CALTECH_TRAIN:
            raise FileProblem(f"{files.root}: class {everything.classes[label]} has only {len(members)} images")
        chosen += draw.choice(members, _CALTECH_TRAIN, replace=False).tolist()
    others = sorted(set(range(len(labels))) - set(chosen))
    return Opened(take_parts(everything, {"train": sorted(chosen), "test": others}))


_SYNSET = re.compile(r"(?:^|/)(n\d{8})/([^/]+)$")
_TRAIN_NAME = re.compile(r"(?:^|/)((n\d{8})/\2_[^/]+\.JPEG)$")
_VAL_NAME = re.compile(r"(?:(n\d{8})/)?(ILSVRC2012_val_\d{8}\.JPEG)$")


def imagenet(files: RawFiles) -> Opened:
    """ImageNet by file names: train, if present, by synset; val too, or with a list.

    Validation images come in the order of their numbers, which ReaL uses.
    """
    train = sorted((match[1], match[2], full) for full in files.places if (match := _TRAIN_NAME.search(full)))
    val = sorted((match[2], match[1] or "", full) for full in files.places if (match := _VAL_NAME.search(full)))
    if not val:
        raise FileProblem(f"{files.root} has no ILSVRC2012_val_….JPEG, neither in val/ nor in ILSVRC2012_img_val.tar")
    listed = {} if all(wnid for _, wnid, _ in val) else _val_list(files)
    val = [(key, wnid or listed.get(key, ""), full) for key, wnid, full in val]
    wnids = sorted({wnid for _, wnid, _ in train or val})
    known = set(wnids)
    if unknown := next((key for key, wnid, _ in val if not wnid or wnid not in known), None):
        raise FileProblem(f"{files.root}: nothing says which class {unknown} belongs to")
    number = {wnid: i for i, wnid in enumerate(wnids)}
    rows = {"train": train, "val": val} if train else {"val": val}
    images = {part: [(key, full, number[wnid]) for key, wnid, full in of] for part, of in rows.items()}
    return Opened({part: files.part(part, wnids, of) for part, of in images.items()})


def _val_list(files: RawFiles) -> dict[str, str]:
    """Kaggle's `LOC_val_solution.csv`, or one synset per line."""
    if files.has("LOC_val_solution.csv"):
        rows = _table(files, "LOC_val_solution.csv", ("ImageId", "PredictionString"))
        return {f"{row['ImageId']}.JPEG": row["PredictionString"].split(" ")[0] for row in rows}
    if files.has("imagenet_2012_validation_synset_labels.txt"):
        lines = files.lines("imagenet_2012_validation_synset_labels.txt")
        return {f"ILSVRC2012_val_{i:08d}.JPEG": wnid for i, wnid in enumerate(lines, start=1)}
    raise FileProblem(
        f"{files.root}: the validation images are in one folder, and nothing says what they show",
        hint="Put LOC_val_solution.csv or imagenet_2012_validation_synset_labels.txt there, or sort them by synset.",
    )


def imagenet_real(files: RawFiles) -> Opened:
    """The validation images with all their correct labels; images without any are left out."""
    val = imagenet(files).part("val")
    try:
        answers: Any = json.loads(files.text("real.json"))
        rows = [tuple(int(label) for label in row) for row in answers]
    except (ValueError, TypeError, RecursionError) as error:
        raise FileProblem(f"{files.root}: real.json is not a list of lists of labels: {error}") from None
    wanted = [int(key.removeprefix("ILSVRC2012_val_")[:8]) - 1 for key in val.keys]
    if max(wanted) >= len(rows):
        raise FileProblem(
            f"{files.root}: real.json has {amount(len(rows), 'row')}, too few for image {max(wanted) + 1:,}"
        )
    kept = [i for i, line in enumerate(wanted) if rows[line]]
    part = take_parts(val, {"test": kept})["test"]
    part = dataclasses.replace(part, labels=several_labels([rows[wanted[i]] for i in kept]))
    return Opened({"test": part}, (f"left out {amount(len(val) - len(kept), 'image')} without any correct label",))


def imagenet21k(files: RawFiles) -> Opened:
    """A folder or a tar per synset; everything is for training."""
    files_by_key = {f"{match[1]}/{match[2]}": full for full in files.places if (match := _SYNSET.search(full))}
    if not files_by_key:
        raise FileProblem(f"{files.root} has no folders or tars called after synsets, as n01440764")
    wnids = sorted({key.partition("/")[0] for key in files_by_key})
    return Opened({"train": _by_folder(files, "train", wnids, files_by_key)})


# --- test sets for models of ImageNet's classes --------------------------------------------------------------------------

_NUMBERED = re.compile(r"(?:^|/)(\d{1,3})/([^/]+\.jpe?g)$", re.IGNORECASE)
_CORRUPTED = re.compile(r"(?:^|/)([a-z_]+)/([1-5])/(n\d{8})/([^/]+)$")
# For validation: not in the mean of the 15.
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def imagenet_v2(files: RawFiles) -> Opened:
    """Folders are the numbers of the classes, 0 to 999 in ImageNet's order, as models count them."""
    found = {
        f"{match[1]}/{match[2]}": (full, int(match[1])) for full in files.places if (match := _NUMBERED.search(full))
    }
    if not found:
        raise FileProblem(f"{files.root} has no folders of images called 0 to 999")
    rows = sorted((label, key, full) for key, (full, label) in found.items())
    return Opened({"test": files.part("test", list(ilsvrc_synsets()), [(key, full, i) for i, key, full in rows])})


def some_synsets(files: RawFiles) -> Opened:
    """Folders of some of ImageNet's synsets."""
    files_by_key = _images_by_synset(files)
    wnids = sorted({key.partition("/")[0] for key in files_by_key})
    note = f"published numbers are among these {len(wnids)} classes alone: `vitlab evaluate --restrict`"
    return Opened({"test": _by_folder(files, "test", wnids, files_by_key)}, (note,))


def imagenet_sketch(files: RawFiles) -> Opened:
    """Folders of ImageNet's thousand synsets."""
    return Opened({"test": _by_folder(files, "test", list(ilsvrc_synsets()), _images_by_synset(files))})


def imagenet_c(files: RawFiles) -> Opened:
    """ImageNet's validation images, corrupted, by kind and severity; all of them, the four extra kinds too."""
    number = {wnid: i for i, wnid in enumerate(ilsvrc_synsets())}
    rows = [
        (f"{kind}/{severity}/{wnid}/{name}", full, number[wnid])
        for full in sorted(files.places)
        if (match := _CORRUPTED.search(full)) and (found := match.groups())[2] in number
        for kind, severity, wnid, name in [found]
    ]
    if not rows:
        raise FileProblem(f"{files.root} has no images such as gaussian_noise/1/n01440764/ILSVRC2012_val_00000293.JPEG")
    return Opened({"test": files.part("test", list(number), rows)})


def _images_by_synset(files: RawFiles) -> dict[str, str]:
    """`n01440764/name` and the file, in that order."""
    names = {f"{match[1]}/{match[2]}": full for full in files.places if (match := _SYNSET.search(full))}
    images = {key: full for key, full in sorted(names.items()) if full.lower().endswith(SUFFIXES)}
    if not images:
        raise FileProblem(f"{files.root} has no images in folders called after synsets, as n01440764")
    if unknown := next((key for key in images if key.partition("/")[0] not in ilsvrc_synsets()), None):
        raise FileProblem(f"{files.root}: {unknown} is not in a folder of one of ImageNet's thousand synsets")
    return images


LAYOUTS = {
    function.__name__: function
    for function in (
        *(oxford_pets, flowers102, dtd, sun397, retinopathy),
        *(tiny_imagenet, class_folders, caltech101, imagenet, imagenet_real, imagenet21k),
        *(imagenet_v2, some_synsets, imagenet_sketch, imagenet_c),
    )
}
