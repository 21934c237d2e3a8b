"""VTAB-1k: nineteen tasks of a thousand training images (Zhai et al. 2019).

VTAB took its sets from TensorFlow Datasets, which stores the images of a part in the order of a hash of their names; "the
first 800" means in that order, so it is computed here from the same names.
"""

import dataclasses
from typing import Literal

from vitlab.core.errors import UnknownName, UsageError
from vitlab.data.sources.named import find_named

TRAIN, VAL = 800, 200  # images to choose settings with
FINAL = TRAIN + VAL  # images that the final number is fitted on
Group = Literal["natural", "specialized", "structured"]


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A task, named like its set.

    `val` and `test` are (part, percent): where in that part they begin. The 200 validation images follow from there, the test
    images go to the end. `names` says how our keys become those of TensorFlow Datasets.
    """

    name: str
    group: Group
    classes: int
    val: tuple[str, int]
    test: tuple[str, int]
    test_images: int
    names: Literal["number", "as is", "joined", "jpg"]
    flip: bool = True  # whether training may mirror an image, or the class would change
    crop: bool = True  # whether training may show a part of it, or what is asked for would be lost


_TASKS = (
    VtabTask("caltech101", "natural", 102, ("train", 90), ("test", 0), 6_084, "as is"),
    VtabTask("cifar100", "natural", 100, ("train", 90), ("test", 0), 10_000, "number"),
    VtabTask("dtd", "natural", 47, ("val", 0), ("test", 0), 1_880, "as is"),
    VtabTask("flowers102", "natural", 102, ("val", 0), ("test", 0), 6_149, "as is"),
    VtabTask("oxford-pets", "natural", 37, ("train", 80), ("test", 0), 3_669, "jpg"),
    VtabTask("sun397", "natural", 397, ("val", 0), ("test", 0), 21_750, "as is"),
    VtabTask("svhn", "natural", 10, ("train", 90), ("test", 0), 26_032, "number"),
    VtabTask("patch-camelyon", "specialized", 2, ("val", 0), ("test", 0), 32_768, "as is"),
    VtabTask("eurosat", "specialized", 10, ("train", 60), ("train", 80), 5_400, "joined"),
    VtabTask("resisc45", "specialized", 45, ("train", 60), ("train", 80), 6_300, "joined"),
    VtabTask("retinopathy", "specialized", 5, ("val", 0), ("test", 0), 42_670, "as is"),
    VtabTask("clevr-count", "structured", 8, ("train", 90), ("val", 0), 15_000, "as is", crop=False),
    VtabTask("clevr-distance", "structured", 6, ("train", 90), ("val", 0), 15_000, "as is", crop=False),
    VtabTask("dmlab", "structured", 6, ("val", 0), ("test", 0), 22_735, "as is", crop=False),
    VtabTask("dsprites-location", "structured", 16, ("train", 80), ("train", 90), 73_728, "number", False, False),
    VtabTask("dsprites-orientation", "structured", 16, ("train", 80), ("train", 90), 73_728, "number", flip=False),
    VtabTask("kitti-distance", "structured", 4, ("val", 0), ("test", 0), 711, "as is", crop=False),
    VtabTask("smallnorb-azimuth", "structured", 18, ("test", 0), ("test", 50), 12_150, "number", flip=False),
    VtabTask("smallnorb-elevation", "structured", 9, ("test", 0), ("test", 50), 12_150, "number"),
)
VTAB = {task.name: task for task in _TASKS}


def find_task(name: str) -> tuple[VtabTask, int | None]:
    """The task of `svhn`, `svhn/800` or `svhn/1000`, and its number of images."""
    plain, slash, images = name.partition("/")
    try:
        known = find_named(plain).name
    except UnknownName:
        known = ""
    if known not in VTAB:
        raise UnknownName("VTAB task", plain, VTAB, list_all=True)
    if slash and images not in (str(TRAIN), str(FINAL)):
        raise UsageError(
            f"'{name}' is not a part of a VTAB task",
            hint=f"Write {plain}/{TRAIN} to choose settings, {plain}/{FINAL} to fit.",
        )
    return VTAB[known], int(images) if slash else None
