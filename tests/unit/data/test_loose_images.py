"""Files, folders and patterns: what they stand for, in which order, and what cannot be read."""

import os
from pathlib import Path

import pytest
from PIL import Image

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.sources.loose_images import open_loose


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.png", "deep/er/c.JPG", ".hidden/d.png", "notes.txt", "with [brackets].png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x") if path.suffix == ".txt" else Image.new("RGB", (4, 4)).save(path)
    return tmp_path / "photos"


def names(dataset: object, root: Path) -> list[str]:
    return [str(Path(key).relative_to(root)) for key in dataset.keys]  # pyright: ignore


def test_folder_means_all_images_below_it_by_name(photos: Path) -> None:
    found = open_loose([photos])
    assert names(found, photos) == ["a.png", "b.jpg", "deep/er/c.JPG", "with [brackets].png"]
    assert (found.classes, found.labels[0]) == ((), ())


def test_order_is_that_of_the_call_and_what_is_named_twice_stays_twice(photos: Path) -> None:
    found = open_loose([photos / "b.jpg", photos / "a.png", photos / "b.jpg"])
    assert names(found, photos) == ["b.jpg", "a.png", "b.jpg"]


def test_pattern_is_expanded_and_a_file_of_that_very_name_comes_first(photos: Path) -> None:
    assert names(open_loose([f"{photos}/*.jpg"]), photos) == ["b.jpg"]
    assert names(open_loose([f"{photos}/**/*.JPG"]), photos) == ["deep/er/c.JPG"]
    assert names(open_loose([photos / "with [brackets].png"]), photos) == ["with [brackets].png"]


def test_missing_file_is_found_out_when_it_is_read(photos: Path) -> None:
    found = open_loose([photos / "gone.jpg", photos / "a.png"])
    assert found.read(1)
    with pytest.raises(FileProblem, match="does not exist"):
        found.read(0)
    assert found.version(0) == ""
    assert found.version(1) != found.version(0)


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(FileProblem, match="is not a file"):
        open_loose([tmp_path / "pipe.png"]).read(0)


@pytest.mark.parametrize(("source", "printed"), [("empty", "holds no images"), ("nothing/*.jpg", "no file matches")])
def test_what_stands_for_nothing_is_refused(source: str, printed: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileProblem, match=printed):
        open_loose([tmp_path / source])


def test_no_names_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="no images were given"):
        open_loose([])
