"""Class folders as people have them, with everything that lies about in them."""

import os
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.errors import FileProblem
from vitlab.data.sources import folders
from vitlab.data.sources.folders import open_folder
from vitlab.runs.training.run_folder import CONFIG, ENVIRONMENT


def tree(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def test_one_folder_per_class(tmp_path: Path) -> None:
    opened = open_folder(tree(tmp_path, "dog/2.JPG", "cat/b/x.png", "cat/a.webp", "dog/1.jpeg"))
    data = opened.parts["all"]
    assert data.classes == ("cat", "dog")
    assert data.keys == ["cat/a.webp", "cat/b/x.png", "dog/1.jpeg", "dog/2.JPG"]
    assert data.labels.single().tolist() == [0, 0, 1, 1]
    assert data.read(3) == b"dog/2.JPG"
    assert opened.notes == ()


def test_parts_share_one_list_of_classes(tmp_path: Path) -> None:
    opened = open_folder(tree(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "Validation/dog/3.jpg", "test/owl/4.jpg"))
    assert list(opened.parts) == ["train", "val", "test"]
    assert opened.classes == ("cat", "dog", "owl")
    assert opened.parts["val"].labels.single().tolist() == [1]
    assert opened.parts["test"].read(0) == b"test/owl/4.jpg"
    assert opened.notes == (
        "train lacks 1 of 3 classes: owl",
        "Validation lacks 2 of 3 classes: cat, owl",
        "test lacks 2 of 3 classes: cat, dog",
    )


@pytest.fixture
def no_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)


def test_what_systems_leave_behind_is_not_an_image_or_a_class(tmp_path: Path, no_heic: None) -> None:
    root = tree(tmp_path, "cat/1.jpg", "cat/.hidden.jpg", "cat/Thumbs.db", ".git/x/1.jpg", "__MACOSX/cat/1.jpg")
    tree(tmp_path, "cat/2.HEIC", "cat/3.heic", "cat/readme")
    opened = open_folder(root)
    assert opened.classes == ("cat",)
    assert opened.parts["all"].keys == ["cat/1.jpg"]
    assert opened.notes == (
        f"{root}: ignored 4 files without an image extension: 2 .heic, 1 .db, 1 without extension",
        f"{root}: 2 .heic photos. Install what reads them:  pip install 'vitlab[heic]'",
    )


def test_files_left_aside_are_all_listed(tmp_path: Path) -> None:
    tree(tmp_path, "cat/1.jpg", "cat/1.txt", "cat/2.txt", "cat/a.db", "cat/a.md", "cat/a.ini", "dog/1.jpg", "dog/a.log")
    (note,) = open_folder(tmp_path).notes
    assert note.endswith("ignored 6 files without an image extension: 2 .txt, 1 .db, 1 .ini, 1 .md and 1 more")


def test_photos_of_a_phone_alone_are_distinguished_from_none(tmp_path: Path, no_heic: None) -> None:
    with pytest.raises(FileProblem, match=r"cat holds 1 \.heic photos.*\nInstall .*'vitlab.heic.'"):
        open_folder(tree(tmp_path, "cat/1.HEIC", "dog/2.heic"))


@pytest.mark.parametrize("part", ["", "train/", "test/"])
def test_a_class_of_phone_photos_beside_others_is_named_with_its_format(
    tmp_path: Path, no_heic: None, part: str
) -> None:
    tree(tmp_path, f"{part}cat/1.HEIC", f"{part}cat/2.heic", f"{part}dog/2.jpg", *(["train/cat/3.jpg"] if part else []))
    if part == "train/":
        (tmp_path / "train/cat/3.jpg").unlink()
    with pytest.raises(FileProblem, match=f"{part}cat holds 2 .heic photos.*\nInstall"):
        open_folder(tmp_path)


def test_an_unpacked_archive_is_entered(tmp_path: Path) -> None:
    opened = open_folder(tree(tmp_path, "photos/photos/cat/1.jpg", "photos/photos/dog/1.jpg"))
    assert opened.classes == ("cat", "dog")
    assert "the only folder" in opened.notes[0]


def test_one_class_with_folders_in_it_is_still_a_class(tmp_path: Path) -> None:
    assert open_folder(tree(tmp_path, "cat/1.jpg", "cat/kittens/2.jpg")).classes == ("cat",)


def test_a_link_back_does_not_go_round_for_ever(tmp_path: Path) -> None:
    root = tree(tmp_path, "cat/1.jpg")
    (root / "cat" / "again").symlink_to(root / "cat", target_is_directory=True)
    assert open_folder(root).parts["all"].keys == ["cat/1.jpg"]


@pytest.mark.skipif(sys.platform != "linux", reason="only here can a file have a name that is not text")
def test_names_that_are_not_text_are_skipped_and_reported(tmp_path: Path) -> None:
    root = tree(tmp_path, "cat/1.jpg", "cat/line\nbreak.jpg")
    Path(os.fsdecode(os.fsencode(root / "cat") + b"/\xff.jpg")).write_bytes(b"x")
    opened = open_folder(root)
    assert opened.parts["all"].keys == ["cat/1.jpg"]
    assert "ignored 2 files with a name that is not text" in opened.notes[0]


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("1.jpg", "2.jpg"), "holds images, but no folder per class"),
        (("readme.txt",), "holds no images in class folders"),
        (("cat/readme.txt",), "holds no images in class folders"),
        (("train/readme.txt", "val/cat/1.jpg"), "train holds no images"),
    ],
)
def test_a_folder_without_classes_says_what_was_expected(tmp_path: Path, files: tuple[str, ...], what: str) -> None:
    with pytest.raises(FileProblem, match=what):
        open_folder(tree(tmp_path, *files))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="is not a folder"):
        open_folder(tmp_path / "absent")


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        (("val/cat/1.jpg", "Test/cat/2.jpg"), {"val": ("cat",), "test": ("cat",)}),
        (("test/1.jpg", "valid/2.jpg"), {"all": ("test", "valid")}),
        (("train/1.jpg", "plane/2.jpg", "test/3.jpg"), {"all": ("plane", "test", "train")}),
        (("test/cat/1.jpg", "plane/2.jpg"), {"all": ("plane", "test")}),
    ],
)
def test_a_part_is_a_folder_of_class_folders(tmp_path: Path, files: Any, parts: dict[str, Any]) -> None:
    opened = open_folder(tree(tmp_path, *files))
    assert {name: part.classes for name, part in opened.parts.items()} == parts
    assert any("taken as classes" in note for note in opened.notes) == ("train/1.jpg" in files)


def test_two_folders_for_one_part_are_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, "train/cat/1.jpg", "val/cat/2.jpg", "validation/cat/3.jpg")
    with pytest.raises(FileProblem, match=r"two folders for val: .*val.*validation"):
        open_folder(root)


def test_an_accent_is_the_same_however_it_is_stored(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    opened = open_folder(tree(tmp_path, f"train/{names[0]}/1.jpg", f"val/{names[1]}/2.jpg", "val/dog/3.jpg"))
    assert opened.classes == (names[0], "dog")
    assert opened.parts["val"].labels.single().tolist() == [0, 1]
    assert opened.parts["val"].read(0).decode() in [f"val/{name}/2.jpg" for name in names]


def test_strange_spaces_numbers_and_loose_images(tmp_path: Path) -> None:
    opened = open_folder(tree(tmp_path, "10/at 3.00\u202fPM.png", "9/\u3000.jpg", "loose.jpg"))
    data = opened.parts["all"]
    assert (data.classes, len(data)) == (("9", "10"), 2)
    assert opened.notes == (f"{tmp_path}: ignored 1 image outside class folders",)


def test_runs_of_vitlab_among_the_classes_are_not_a_class(tmp_path: Path) -> None:
    assert (CONFIG, ENVIRONMENT) == folders._RUN_FILES
    photos = tree(tmp_path / "photos", "ants/1.jpg", "bees/2.jpg")
    bare = open_folder(photos)
    tree(photos, *(f"runs/train-1/{name}" for name in (CONFIG, ENVIRONMENT, "plots/patches.png")), "runs/notes.txt")
    opened = open_folder(photos)
    assert opened.parts["all"].fingerprint() == bare.parts["all"].fingerprint()
    assert opened.notes == (f"{photos}: ignored, because they hold runs of vitlab: runs",)
    assert open_folder(tree(tmp_path, "runs/a/b/config.toml", "runs/a/b/env.json")).classes == ("ants", "bees")
    tree(photos, "runs/3.jpg")
    assert open_folder(photos).classes == ("ants", "bees", "runs"), "an image beside them makes it a class"


def test_class_folder_of_folders_is_reported(tmp_path: Path) -> None:
    root = tree(tmp_path, "insects/bees/2.jpg", "insects/ants/1.jpg", "cats/3.jpg", "cats/old/4.jpg", "cats/new/5.jpg")
    opened = open_folder(root)
    assert opened.classes == ("cats", "insects")
    assert opened.notes == (f"{root}: folders inside a class folder count as that class: insects (ants, bees)",)
