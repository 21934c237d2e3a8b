"""Folders of class folders, as people have them: one folder per class, or `train/ val/ test/` with such folders in each.

Owns what counts as an image, a class and a part. Only names are read here: what a file really is, the decoder finds out.
"""

import dataclasses
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    root, notes = _unwrap(root)
    found = {_PART_NAMES[name.lower()]: name for name in _subfolders(root) if name.lower() in _PART_NAMES}
    named = {part: found[part] for part in PARTS if part in found}
    if "train" not in named:
        return Opened({"all": _open_part(root, "", _subfolders(root), notes)}, tuple(notes))
    if extra := [name for name in _subfolders(root) if name.lower() not in _PART_NAMES]:
        notes.append(f"not used beside {', '.join(named.values())}: {', '.join(extra[:3])}{' …' if extra[3:] else ''}")
    classes = {part: _subfolders(root / name) for part, name in named.items()}
    every = _in_order({name for names in classes.values() for name in names})
    for part, names in classes.items():
        if missing := sorted(set(every) - set(names)):
            notes.append(f"{named[part]} lacks {len(missing)} of {len(every)} classes: {', '.join(missing[:3])}")
    return Opened({part: _open_part(root, name, every, notes) for part, name in named.items()}, tuple(notes))


def _open_part(root: Path, part: str, classes: Sequence[str], notes: list[str]) -> Dataset:
    where = root / part if part else root
    notes += _unnameable(where)
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


def _unwrap(root: Path) -> tuple[Path, list[str]]:
    """An unpacked archive is often one folder inside another: goes in while there is nothing else to see."""
    notes: list[str] = []
    seen = {os.path.realpath(root)}
    while True:
        if not root.is_dir():
            raise FileProblem(f"{root} is not a folder")
        inside = _subfolders(root)
        if len(inside) != 1 or inside[0].lower() in _PART_NAMES or not _subfolders(root / inside[0]):
            return root, notes
        if any(name.lower().endswith(SUFFIXES) for name in (*_names(root), *_names(root / inside[0]))):
            return root, notes
        if (real := os.path.realpath(root / inside[0])) in seen:  # a link back to where one came from
            return root, notes
        seen.add(real)
        notes.append(f"read from {root / inside[0]}, the only folder in {root}")
        root = root / inside[0]


def _subfolders(folder: Path) -> list[str]:
    found = [entry.name for entry in _entries(folder) if _is_folder(entry)]
    return _in_order(name for name in found if name.lower() not in _NOT_A_CLASS and _is_text(name))


def _unnameable(folder: Path) -> list[str]:
    """A note where a class is left aside because of its name."""
    strange = [entry.name for entry in _entries(folder) if _is_folder(entry) and not _is_text(entry.name)]
    return (
        [f"{folder}: {len(strange)} folder(s) with names that are no text were left aside; rename them"]
        if strange
        else []
    )


def _in_order(names: Iterable[str]) -> list[str]:
    """The same on every system, however it spells an accent."""
    return sorted(names, key=lambda name: (unicodedata.normalize("NFC", name), name))


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_file()]


def _files(root: Path, below: str) -> list[str]:
    """Every file below `root/below`, as a path from `root` with forward slashes, in the same order on every system."""
    if not (root / below).is_dir():
        return []
    above = {str(folder) for folder in Path(os.path.realpath(root / below)).parents}
    return sorted(_walk(root, below, above))


def _walk(root: Path, below: str, seen: set[str]) -> Iterator[str]:
    """Links are followed, also out of the folder, but into no folder that was `seen`, nor back into one above the class."""
    real = os.path.realpath(root / below)
    if real in seen:
        return
    seen.add(real)
    entries = _entries(root / below)
    yield from (f"{below}/{entry.name}" for entry in entries if not _is_folder(entry) and not _is_special(entry))
    for entry in sorted(filter(_is_folder, entries), key=lambda entry: (entry.is_symlink(), entry.name)):
        yield from _walk(root, f"{below}/{entry.name}", seen)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise FileProblem(f"{folder} cannot be read: {error.strerror or error}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in a circle
        return False


def _is_special(entry: os.DirEntry[str]) -> bool:
    """A pipe or a device, at which a reader would wait for ever. A dead link is a file that cannot be read, and is named so."""
    try:
        return not entry.is_file(follow_symlinks=False) and not stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return False


def _is_text(name: str) -> bool:
    """Whether the name can be written down again: names of another encoding come out of the system as half characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name.isprintable()
