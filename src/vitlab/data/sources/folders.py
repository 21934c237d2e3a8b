"""Folders of images: one folder per class, or `train/ val/ test/` of such folders.

Owns what counts as an image, a class and a part. Only names are read here, never the files.
"""

import dataclasses
import io
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem, amount
from vitlab.core.reading import file_version, read_bytes
from vitlab.data.dataset import (
    PART_NAMES,
    PARTS,
    Dataset,
    Opened,
    class_order,
    one_for_each,
    one_spelling,
    single_labels,
    some_of,
)
from vitlab.data.decode import how_to_read
from vitlab.data.sources.raw import tiff
from vitlab.data.sources.raw.binary import npy_array

SUFFIXES = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
ARRAY = ".npy"  # one image of any number of channels; not among SUFFIXES, since in shards it may be anything
_PHOTOS = (".avif", ".dng", ".heic", ".heif")  # what phones write too, and not every decoder reads
_LISTED = 3  # names in a note; the number of the others follows
_NAMED = 4  # endings of files that are ignored: as many as a line has room for
_NOT_A_CLASS = ("__macosx", "@eadir", "lost+found")  # what systems leave behind
_RUN_FILES = ("config.toml", "env.json")  # what the folder of every run has


def read_image(path: Path) -> "bytes | np.ndarray[Any, Any]":
    """An encoded image, or [rows, columns, channels] of a `.npy` or of a TIFF of bands that no decoder has a mode for.

    Arrays are uint8, uint16, or float from 0 to 1; the decoder converts them to uint8.
    """
    data, ending = read_bytes(path), path.suffix.lower()
    if ending == ARRAY:
        pixels = npy_array(io.BytesIO(data), len(data), str(path))
    elif ending not in tiff.SUFFIXES or (pixels := tiff.tiff_bands(data)) is None:
        return data
    kind: np.dtype[Any] = pixels.dtype.newbyteorder("=")
    usable = kind.name in ("uint8", "uint16") or kind.kind == "f"
    if not usable or pixels.ndim not in (2, 3) or not pixels.size:
        what = f"holds {pixels.dtype} {list(pixels.shape)}, not uint8, uint16 or float [rows, columns, channels]"
        raise FileProblem(what)
    pixels = pixels.astype(kind, copy=False)
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Reads `root/key`: an encoded image, or the array of a `.npy` or of a TIFF of many bands."""

    root: Path
    keys: Sequence[str]

    def __call__(self, i: int) -> "bytes | np.ndarray[Any, Any]":
        return read_image(self.root / self.keys[i])

    def version(self, i: int) -> str:
        return file_version(os.path.join(self.root, self.keys[i]))  # noqa: PTH118 (a million of them)


def open_folder(root: Path) -> Opened:
    """Every image below `root` under its class, by part, or in one part, `all`."""
    root, notes = _unwrap(root)
    named, extra = _parts(root, notes)
    if not named:
        return Opened({"all": _open_part(root, "", _classes(root), notes)}, tuple(notes))
    if extra:
        notes.append(f"not used, next to {', '.join(named.values())}: {some_of(extra, _LISTED)}")
    classes = {part: _classes(root / name) for part, name in named.items()}
    every = class_order({name for names in classes.values() for name in names})
    for part, names in classes.items():
        if missing := sorted(set(every) - set(names)):
            notes.append(f"{named[part]} lacks {len(missing)} of {len(every)} classes: {', '.join(missing[:3])}")
    return Opened({part: _open_part(root, name, every, notes) for part, name in named.items()}, tuple(notes))


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a training run, by the names in it."""
    return all((folder / name).is_file() for name in _RUN_FILES)


def holds_classes(root: Path) -> bool:
    """Whether some folder in it, or in one of its parts, holds images."""
    folders = [root / name for name in _subfolders(root)]
    return any(map(_loose, folders)) or any(_loose(folder / name) for folder in folders for name in _subfolders(folder))


def holds_loose(root: Path) -> bool:
    """Whether images are directly in it, outside class folders."""
    return _loose(root) > 0


def _parts(root: Path, notes: list[str]) -> tuple[dict[str, str], list[str]]:
    """The folders of the parts, and those beside them; none where they are classes.

    A part holds class folders. `train` makes the others parts as well, unless it is full of images itself; without it, every
    folder has to be a part.
    """
    names = _subfolders(root)
    extra = [name for name in names if name.lower() not in PART_NAMES]
    called = [name for name in names if name not in extra]
    trains = [name for name in called if PART_NAMES[name.lower()] == "train"]
    if extra and any(_loose(root / name) and not _subfolders(root / name) for name in trains):
        notes.append(f"taken as classes, because they hold images: {', '.join(called)}")
        return {}, []
    if not trains and (extra or not all(_subfolders(root / name) for name in called)):
        return {}, []
    folder_of = one_for_each(root, "folders", ((PART_NAMES[name.lower()], name) for name in called))
    return {part: folder_of[part] for part in PARTS if part in folder_of}, extra


def _open_part(root: Path, part: str, classes: Sequence[str], notes: list[str]) -> Dataset:
    where = root / part if part else root
    notes += _unnameable(where)
    loose = _loose(where)
    spelled: dict[str, list[str]] = {}
    for name in _subfolders(where):
        spelled.setdefault(one_spelling(name), []).append(f"{part}/{name}" if part else name)
    keys: list[str] = []
    labels: list[int] = []
    other, unreadable = Counter[str](), 0
    nested: list[str] = []
    readable = (ARRAY, *(ending for ending in SUFFIXES if not how_to_read(ending)))
    for label, name in enumerate(classes):
        first, unknown = len(keys), Counter[str]()
        for key in (key for folder in spelled.get(name, ()) for key in _files(root, folder)):
            if not key.lower().endswith(readable):
                unknown[Path(key).suffix.lower() or "without extension"] += 1
            elif not _is_text(key):
                unreadable += 1
            else:
                keys.append(key)
                labels.append(label)
        if (photos := _photos(unknown)) and len(keys) == first:  # training or testing without the class would be wrong
            raise FileProblem(f"{where / name} holds {photos} and no other image", hint=_remedies(unknown))
        other += unknown
        inside = _folders_of_images(keys[first:], 2 if part else 1)
        if len(inside) > 1:
            nested.append(f"{name} ({some_of(inside, _LISTED)})")
    if nested:
        notes.append(f"{where}: folders inside a class folder count as that class: {some_of(nested, _LISTED)}")
    if other:
        endings = some_of([f"{count} {ending}" for ending, count in other.most_common()], _NAMED)
        notes.append(f"{where}: ignored {amount(other.total(), 'file')} without an image extension: {endings}")
    if photos := _photos(other):
        notes.append(f"{where}: {photos}. {_remedies(other)}")
    if unreadable:
        notes.append(
            f"{where}: ignored {amount(unreadable, 'file')} with a name that is not text; rename what you need"
        )
    if keys and loose:
        notes.append(f"{where}: ignored {amount(loose, 'image')} outside class folders")
    if not keys:
        raise FileProblem(
            f"{where} holds {'images, but no folder per class' if loose else 'no images in class folders'}",
            hint=f"Expected: {where}/CLASS/IMAGE, with one of {', '.join(SUFFIXES)}.",
        )
    return Dataset(str(where), tuple(classes), keys, single_labels(labels), FileReader(root, keys))


def _photos(endings: Counter[str]) -> str:
    """`12 .heic photos`, of what the decoder does not read; empty where there is none."""
    return ", ".join(f"{endings[ending]} {ending} photos" for ending in _PHOTOS if endings[ending])


def _remedies(endings: Counter[str]) -> str:
    return " ".join(dict.fromkeys(how_to_read(ending) for ending in _PHOTOS if endings[ending]))


def _folders_of_images(keys: Sequence[str], depth: int) -> list[str]:
    """The folders at `depth` that hold all images of a class, if any."""
    inside = {key.split("/")[depth] if key.count("/") > depth else "" for key in keys}
    return [] if "" in inside else class_order(inside)


def _unwrap(root: Path) -> tuple[Path, list[str]]:
    """Enter folders that hold nothing but one folder, as unpacked archives do."""
    notes: list[str] = []
    seen = {os.path.realpath(root)}
    while True:
        if not root.is_dir():
            raise FileProblem(f"{root} is not a folder")
        notes += _ignored_runs(root)
        names = _subfolders(root)
        if len(names) != 1 or names[0].lower() in PART_NAMES:
            return root, notes
        inner, real = root / names[0], os.path.realpath(root / names[0])
        if not _subfolders(inner) or _loose(root) or _loose(inner) or real in seen:  # a link back to a parent
            return root, notes
        seen.add(real)
        notes.append(f"read from {inner}, the only folder in {root}")
        root = inner


def _subfolders(folder: Path) -> list[str]:
    found = [entry.name for entry in _entries(folder) if _is_folder(entry)]
    named = [name for name in found if name.lower() not in _NOT_A_CLASS and _is_text(name)]
    return class_order(name for name in named if not _only_runs(folder / name))


def _classes(folder: Path) -> list[str]:
    return class_order({one_spelling(name) for name in _subfolders(folder)})


def _unnameable(folder: Path) -> list[str]:
    """A note where a class is ignored because of its name."""
    count = sum(_is_folder(entry) and not _is_text(entry.name) for entry in _entries(folder))
    return (
        [f"{folder}: ignored {amount(count, 'folder')} with a name that is not text; rename what you need"]
        if count
        else []
    )


def _ignored_runs(folder: Path) -> list[str]:
    """A note where results of vitlab lie among the classes."""
    runs = sorted(entry.name for entry in _entries(folder) if _is_folder(entry) and _only_runs(folder / entry.name))
    return [f"{folder}: ignored, because they hold runs of vitlab: {some_of(runs, _LISTED)}"] if runs else []


def _only_runs(folder: Path) -> bool:
    """Whether runs of vitlab lie in it, and no image beside them."""
    runs = False
    for _, inner, names in os.walk(folder):
        if set(names).issuperset(_RUN_FILES):
            runs, inner[:] = True, []  # plots of a run are not images of the data
        elif any(name.lower().endswith(SUFFIXES) for name in names):
            return False
    return runs


def _loose(folder: Path) -> int:
    """The number of images in the folder itself."""
    images = (entry for entry in _entries(folder) if entry.name.lower().endswith((ARRAY, *SUFFIXES)))
    return sum(not _is_folder(entry) and not _is_special(entry) for entry in images)


def _files(root: Path, below: str) -> list[str]:
    """Every file below `root/below`, from `root`, in the same order on every system."""
    above = {str(folder) for folder in Path(os.path.realpath(root / below)).parents}
    return sorted(_walk(root, below, above))


def _walk(root: Path, below: str, seen: set[str]) -> Iterator[str]:
    """Files below, links followed, but into no folder that was `seen` or is above."""
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
    """A pipe or a device, on which a reader would block forever. Not a dead link."""
    try:
        return not entry.is_file(follow_symlinks=False) and not stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return False


def _is_text(name: str) -> bool:
    """Whether a name can be written on one line: no control or half characters.

    Names of another encoding come out of the system as half characters. Spaces of any kind are text: macOS uses a narrow one.
    """
    return not any(unicodedata.category(sign) in ("Cs", "Cc") for sign in name)
