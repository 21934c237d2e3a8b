"""Folders of class folders, as people have them: one folder per class, or `train/ val/ test/` with such folders in each.

Owns what counts as an image, a class and a part. Only names are read here: what a file really is, the decoder finds out.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitlab.core.errors import FileProblem
from vitlab.data.dataset import PARTS, Dataset, Opened, single_labels

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_PART_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NOT_A_CLASS = ("__macosx", "@eadir", "lost+found")  # what systems leave behind


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Reads `root/key`."""

    root: Path
    keys: Sequence[str]

    def __call__(self, i: int) -> bytes:
        return (self.root / self.keys[i]).read_bytes()


def open_folder(root: Path) -> Opened:
    """Every image below `root` under its class; the parts where the folder has them, else one part, `all`."""
    root, notes = _unwrap(root, [])
    found = {_PART_NAMES[name.lower()]: name for name in _subfolders(root) if name.lower() in _PART_NAMES}
    named = {part: found[part] for part in PARTS if part in found}
    if "train" not in named:
        return Opened({"all": _open_part(root, "", _subfolders(root), notes)}, tuple(notes))
    if extra := [name for name in _subfolders(root) if name.lower() not in _PART_NAMES]:
        notes.append(f"not used beside {', '.join(named.values())}: {', '.join(extra[:3])}{' …' if extra[3:] else ''}")
    classes = {part: _subfolders(root / name) for part, name in named.items()}
    every = sorted({name for names in classes.values() for name in names})
    for part, names in classes.items():
        if missing := sorted(set(every) - set(names)):
            notes.append(f"{named[part]} lacks {len(missing)} of {len(every)} classes: {', '.join(missing[:3])}")
    return Opened({part: _open_part(root, name, every, notes) for part, name in named.items()}, tuple(notes))


def _open_part(root: Path, part: str, classes: Sequence[str], notes: list[str]) -> Dataset:
    keys: list[str] = []
    labels: list[int] = []
    other = unreadable = 0
    for label, name in enumerate(classes):
        for key in _files(root, f"{part}/{name}" if part else name):
            if not key.lower().endswith(SUFFIXES):
                other += 1
            elif not _is_text(key):
                unreadable += 1
            else:
                keys.append(key)
                labels.append(label)
    where = root / part if part else root
    if other:
        notes.append(f"{where}: {other} file(s) that are no images by their name were left aside")
    if unreadable:
        notes.append(f"{where}: {unreadable} file(s) with names that are no text were left aside; rename them")
    if not keys:
        loose = any(name.lower().endswith(SUFFIXES) for name in _names(where))
        raise FileProblem(
            f"{where} holds {'images, but no folder per class' if loose else 'no images in class folders'}",
            hint=f"Expected: {where}/CLASS/IMAGE, with one of {', '.join(SUFFIXES)}.",
        )
    return Dataset(str(where), tuple(classes), keys, single_labels(labels), FileReader(root, keys))


def _unwrap(root: Path, notes: list[str]) -> tuple[Path, list[str]]:
    """An unpacked archive is often one folder inside another: goes in while there is nothing else to see."""
    if not root.is_dir():
        raise FileProblem(f"{root} is not a folder")
    inside = _subfolders(root)
    if len(inside) != 1 or inside[0].lower() in _PART_NAMES or not _subfolders(root / inside[0]):
        return root, notes
    if any(name.lower().endswith(SUFFIXES) for name in (*_names(root), *_names(root / inside[0]))):
        return root, notes
    notes.append(f"read from {root / inside[0]}, the only folder in {root}")
    return _unwrap(root / inside[0], notes)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(name for name in found if name.lower() not in _NOT_A_CLASS and _is_text(name))


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]


def _files(root: Path, below: str) -> list[str]:
    """Every file below `root/below`, as a path from `root` with forward slashes, in the same order on every system.

    A link to a folder is followed once; a link back to where one came from is not.
    """
    found: list[str] = []
    seen: set[str] = set()
    for folder, inner, names in os.walk(root / below, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = [name for name in inner if not name.startswith(".")]
        prefix = Path(folder).relative_to(root).as_posix()
        found += [f"{prefix}/{name}" for name in names if not name.startswith(".")]
    return sorted(found)


def _is_text(name: str) -> bool:
    """Whether the name can be written down again: names of another encoding come out of the system as half characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.isprintable()
