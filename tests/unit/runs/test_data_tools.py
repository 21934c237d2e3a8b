"""Checking and splitting from a folder to the files that are left behind."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.models.build import create_model
from vitlab.runs.data_tools import check_data, split_data
from vitlab.weights.bundle import Bundle, save_bundle

HOSTILE = "<img src=x onerror=alert(1)>.png"


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes of thirty noise pictures each, three to an animal."""
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(30):
            picture = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((32, 32))
            picture.save(tmp_path / "pets" / name / f"{name}{i // 3}_{i % 3}.png")
    return tmp_path / "pets"


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_findings_are_stored_as_json_and_as_a_page_that_runs_nothing_of_theirs(pets: Path, tmp_path: Path) -> None:
    (pets / "dog" / HOSTILE).write_bytes((pets / "cat" / "cat0_0.png").read_bytes())
    found = check_data(pets, out=tmp_path / "out", workers=1, quiet=True)
    assert found.counts == {"contradiction": 1}
    stored = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert (stored["images"], stored["serious"]) == (61, True)
    assert [item["key"] for item in stored["findings"][0]["items"]] == ["cat/cat0_0.png", f"dog/{HOSTILE}"]
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert len(re.findall('src="data:image/jpeg;base64,', page)) == 2
    assert page.count("<script") == 1 and not re.findall(r"https?://", page)


def test_nothing_is_written_where_something_stands(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        check_data(pets, out=tmp_path, quiet=True)


def test_test_images_of_other_data_are_looked_for(pets: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / "other" / part / "x").mkdir(parents=True)
    (tmp_path / "other/train/x/1.png").write_bytes((pets / "cat/cat1_0.png").read_bytes())
    (tmp_path / "other/test/x/2.png").write_bytes((pets / "cat/cat2_0.png").read_bytes())
    found = check_data(pets, against=tmp_path / "other", workers=1, quiet=True)
    assert [[item.key for item in finding.items] for finding in found.findings] == [["cat/cat2_0.png", "test/x/2.png"]]


def test_labels_are_compared_when_a_model_is_given(pets: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(pets.rglob("*.png"))):
        level = (60 if path.parent.name == "cat" else 190) + i % 7
        picture = np.asarray(Image.open(path)) // 8 + level
        Image.fromarray(picture.astype(np.uint8)).save(path)
    (pets / "dog" / "dog0_0.png").rename(pets / "cat" / "wrong.png")
    model = create_model("ViT-mu/16", num_classes=2, image_size=16, seed=0)
    save_bundle(tmp_path / "bundle", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    found = check_data(pets, model=tmp_path / "bundle", device="cpu", workers=1, quiet=True)
    doubtful = [(finding.items[0].key, finding.text) for finding in found.findings if finding.kind == "label"]
    assert doubtful == [("cat/wrong.png", "looks like dog")]


def test_split_can_be_read_as_data(pets: Path, tmp_path: Path) -> None:
    done = split_data(pets, tmp_path / "tables" / "split.csv", seed=3)
    assert done.counts == {"train": {"cat": 24, "dog": 24}, "val": {"cat": 3, "dog": 3}, "test": {"cat": 3, "dog": 3}}
    opened = open_data(done.out)
    assert {name: len(part) for name, part in opened.parts.items()} == {"train": 48, "val": 6, "test": 6}
    assert opened.parts["val"].read(0) == (done.out.parent / opened.parts["val"].keys[0]).read_bytes()
    assert vitlab.check_data(done.out, workers=1, quiet=True).findings == ()


def test_same_seed_writes_the_same_bytes(pets: Path, tmp_path: Path) -> None:
    tables = [split_data(pets, tmp_path / f"{i}.csv", seed=seed).out.read_bytes() for i, seed in enumerate((7, 7, 8))]
    assert tables[0] == tables[1] != tables[2]


def test_groups_by_name_stay_together(pets: Path, tmp_path: Path) -> None:
    done = split_data(pets, tmp_path / "split.csv", group_by=r"([a-z]+\d+)_")
    assert done.groups == 20
    parts: dict[str, set[str]] = {}
    for row in rows(done.out):
        parts.setdefault(row["group"], set()).add(row["split"])
    assert {len(found) for found in parts.values()} == {1}
    assert done.counts["train"] == {"cat": 24, "dog": 24}


def test_copies_stay_together(pets: Path, tmp_path: Path) -> None:
    for path in sorted(pets.rglob("*_0.png")):
        with Image.open(path) as picture:
            picture.resize((40, 40)).save(path.with_name(f"copy of {path.stem}.jpg"), quality=95)
    done = split_data(pets, tmp_path / "split.csv", quiet=True)
    assert (done.copies, done.copies_apart) == (20, 0)
    assert done.counts["test"] == {"cat": 4, "dog": 4}
    part = {Path(row["path"]).stem: row["split"] for row in rows(done.out)}
    assert all(part[name.removeprefix("copy of ")] == own for name, own in part.items())
    assert "leak" not in vitlab.check_data(done.out, workers=1, quiet=True).counts


REFUSED = [
    ({"group_by": "patient"}, "finds nothing in 60 of 60 names"),
    ({"group_by": "("}, "is not a regular expression"),
    ({"train": 0.9, "val": 0.0, "test": 0.0}, "two parts or three"),
]


@pytest.mark.parametrize(("options", "printed"), REFUSED)
def test_split_that_cannot_be_is_refused_and_leaves_nothing(
    pets: Path, tmp_path: Path, options: dict, printed: str
) -> None:
    with pytest.raises(UsageError, match=printed):
        split_data(pets, tmp_path / "split.csv", **options)
    assert not (tmp_path / "split.csv").exists()


def test_data_that_is_split_already_is_refused(pets: Path, tmp_path: Path) -> None:
    table = split_data(pets, tmp_path / "split.csv").out
    with pytest.raises(UsageError, match=r"split.*train, val, test"):
        split_data(table, tmp_path / "again.csv")
