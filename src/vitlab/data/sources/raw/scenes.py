"""Sets with scene descriptions, and the labels that VTAB derives from them."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.raw.files import RawFiles, take_parts

CLEVR_EDGES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)  # VTAB's; what is measured is the distance to the camera
KITTI_EDGES = (-100.0, 8.0, 20.0, 999.0)  # metres; VTAB's
NO_VEHICLE = 1000.0
_CLEVR_LEAST = 3  # objects in a scene


def last_edge_below(value: float, edges: Sequence[float]) -> int:
    """VTAB's bins: the number of the last edge below the value, in float32."""
    return int(np.flatnonzero(np.asarray(edges, np.float32) < np.float32(value))[-1])


def count_objects(objects: Sequence[Mapping[str, Any]]) -> int:
    return len(objects) - _CLEVR_LEAST


def nearest_object(objects: Sequence[Mapping[str, Any]]) -> int:
    return last_edge_below(min(float(thing["pixel_coords"][2]) for thing in objects), CLEVR_EDGES)


def nearest_vehicle(lines: Sequence[str]) -> int:
    """The bin of KITTI's nearest vehicle: type first, distance as the 14th number."""
    rows = [line.split() for line in lines]
    return last_edge_below(
        min([NO_VEHICLE, *(float(row[13]) for row in rows if row[0] in ("Car", "Van", "Truck"))]), KITTI_EDGES
    )


def clevr(files: RawFiles, label: Callable[[Sequence[Mapping[str, Any]]], int], classes: Sequence[str]) -> Opened:
    parts: dict[str, Dataset] = {}
    for part in ("train", "val"):
        try:
            scenes: Any = json.loads(files.text(f"CLEVR_{part}_scenes.json"))
            keys = [str(scene["image_filename"]) for scene in scenes["scenes"]]
            labels = [label(scene["objects"]) for scene in scenes["scenes"]]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise FileProblem(f"{files.root}: CLEVR_{part}_scenes.json cannot be read: {error}") from None
        paths = [f"images/{part}/{key}" for key in keys]
        parts[part] = files.part(part, classes, zip(keys, paths, labels, strict=True))
    return Opened(parts)


def clevr_count(files: RawFiles) -> Opened:
    return clevr(files, count_objects, [str(i) for i in range(3, 11)])


def clevr_distance(files: RawFiles) -> Opened:
    return clevr(files, nearest_object, [f"{a:g} to {b:g}" for a, b in itertools.pairwise(CLEVR_EDGES)])


def kitti_distance(files: RawFiles) -> Opened:
    """The labelled images, split by video with TensorFlow Datasets' draw."""
    videos = _kitti_videos(files)
    if len(set(videos)) < 3:  # one each to train, validate and test
        raise FileProblem(f"{files.root}: the lists in mapping/ do not fit together: fewer videos than parts")
    draw = np.random.RandomState(123)
    held = max(1, len(set(videos)) // 10)  # a tenth of the videos tests, another validates
    test = set(draw.choice(sorted(set(videos)), held, replace=False).tolist())
    val = set(draw.choice(sorted(set(videos) - test), held, replace=False).tolist())
    keys = [f"{i:06d}.png" for i in range(len(videos))]
    try:
        labels = [nearest_vehicle(files.lines(f"training/label_2/{i:06d}.txt")) for i in range(len(videos))]
    except (ValueError, IndexError) as error:
        raise FileProblem(f"{files.root}: a file in training/label_2 cannot be read: {error}") from None
    classes = ("below 8 m", "8 to 20 m", "beyond 20 m", "no vehicle")
    everything = files.part(
        "all", classes, [(key, f"training/image_2/{key}", i) for key, i in zip(keys, labels, strict=True)]
    )
    parts = {"val": val, "test": test, "train": set(videos) - val - test}
    rows = {part: [i for i, video in enumerate(videos) if video in of] for part, of in parts.items()}
    return Opened(take_parts(dataclasses.replace(everything, groups=videos), rows))


def _kitti_videos(files: RawFiles) -> list[str]:
    """The video of each image, by its line number in `train_mapping.txt`."""
    lines = files.lines("mapping/train_mapping.txt")
    try:
        numbers = [int(text) for text in files.text("mapping/train_rand.txt").split(",")]
        if min(numbers) < 1:
            raise ValueError("a line number below 1")
        return [lines[number - 1].split()[1] for number in numbers]
    except (ValueError, IndexError) as error:
        raise FileProblem(f"{files.root}: the lists in mapping/ do not fit together: {error}") from None


LAYOUTS = {function.__name__: function for function in (clevr_count, clevr_distance, kitti_distance)}
