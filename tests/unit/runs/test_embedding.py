"""Vectors in a file: the right ones, beside the right names, and computed once."""

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.runs.evaluation.embedding import Embedding
from vitlab.weights.bundle import Bundle, save_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b"
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, seed=0)
    save_bundle(path, Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee"), "card", {}))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for i, name in enumerate(
        ("train/ant/a.png", "train/bee/b.png", "train/bee/c.png", "val/ant/d.png", "val/bee/e.png")
    ):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (20 + i, 24, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def embed(bundle: Path, tmp_path: Path) -> Callable[..., Embedding]:
    def call(data: Any, out: Path, **options: Any) -> Embedding:
        given: dict[str, Any] = {
            "device": "cpu",
            "threads": 1,
            "quiet": True,
            "workers": 0,
            "cache": tmp_path / "cache",
        }
        return vitlab.embed(bundle, data, out, **given | options)

    return call


def test_npz_and_parquet_hold_the_same_vectors_as_the_classifier(
    bundle: Path, photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    done = embed(photos, tmp_path / "v.npz")
    again = embed(photos, tmp_path / "v.parquet")
    assert (done.images, done.width, done.computed, again.computed) == (5, 16, 5, 0)
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        found = {name: stored[name] for name in stored.files}
    table = parquet.read_table(tmp_path / "v.parquet").to_pydict()
    assert (
        found["path"].tolist()
        == table["path"]
        == [*("train/ant/a.png", "train/bee/b.png", "train/bee/c.png", "val/ant/d.png", "val/bee/e.png")]
    )
    assert found["label"].tolist() == table["label"] == ["ant", "bee", "bee", "ant", "bee"]
    assert found["split"].tolist() == table["split"] == ["train"] * 3 + ["val"] * 2
    assert np.array_equal(np.array(table["vector"], np.float32), found["vector"])
    wanted = vitlab.load(bundle, device="cpu", quiet=True).embed([photos / name for name in found["path"]])
    np.testing.assert_allclose(found["vector"], wanted.numpy(), rtol=0, atol=1e-5)


def test_csv_json_and_rows_in_memory_hold_the_same_numbers(
    photos: Path, bundle: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    embed(photos, tmp_path / "v.npz")
    embed(photos, tmp_path / "v.csv")
    embed(photos, tmp_path / "v.json")
    here = vitlab.embed(bundle, photos, device="cpu", workers=0, quiet=True, cache=tmp_path / "cache")
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        wanted = [
            {"path": str(path), "split": str(split), "label": str(label), "vector": vector}
            for path, split, label, vector in zip(*(stored[name] for name in stored.files), strict=True)
        ]
    with (tmp_path / "v.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    listed = json.loads((tmp_path / "v.json").read_text())
    assert list(table[0]) == ["path", "split", "label", *(f"v{i}" for i in range(16))]
    assert here.out is None and here.to_json() == listed
    for row, line, right in zip(listed, table, wanted, strict=True):
        vector = right.pop("vector")
        assert np.array_equal(np.array(row.pop("vector"), np.float32), vector)
        assert np.array_equal(np.array([line.pop(f"v{i}") for i in range(16)], np.float32), vector)
        assert row == line == right


def test_one_part_layers_and_tokens_can_be_chosen(
    photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    done = embed(photos, tmp_path / "v.npz", part="val", layers=(0, 1), tokens="mean")
    assert (done.images, done.width) == (2, 32)


@pytest.mark.parametrize("as_list", [False, True])
def test_images_without_classes_have_no_label(
    as_list: bool, photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    folder = photos / "train" / "bee"
    embed([folder / "c.png", folder / "b.png"] if as_list else folder, tmp_path / "v.npz")
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        assert [Path(name).name for name in stored["path"]] == (["c.png", "b.png"] if as_list else ["b.png", "c.png"])
        assert stored["label"].tolist() == ["", ""]


def test_file_names_that_are_not_utf8_have_vectors_too(
    photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)  # noqa: PTH102 (bytes)
    shutil.copy(photos / "val" / "ant" / "d.png", folder + b"/caf\xe9.png")
    assert embed(tmp_path / "odd", tmp_path / "v.npz").images == 1
    assert embed(tmp_path / "odd", tmp_path / "v.parquet").computed == 0
    assert parquet.read_table(tmp_path / "v.parquet")["path"].to_pylist() == [f"{tmp_path}/odd/caf\\xe9.png"]


def test_bad_file_is_left_out_and_named(photos: Path, embed: Callable[..., Embedding], tmp_path: Path) -> None:
    (photos / "train" / "bee" / "broken.png").write_bytes(b"no image")
    done = embed(photos, tmp_path / "v.npz")
    assert list(done.bad) == ["train/bee/broken.png"]
    assert done.images == 5
    assert "without 1 image that could not be read" in done.sentences()[1]
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        assert "train/bee/broken.png" not in stored["path"]
        assert np.isfinite(stored["vector"]).all()


@pytest.mark.slow
def test_parquet_larger_than_one_piece_is_whole(
    embed: Callable[..., Embedding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.runs.evaluation import embedding

    monkeypatch.setattr(embedding, "_ROWS", 100)
    embed("digits", tmp_path / "v.parquet", cache=tmp_path / "cache")
    embed("digits", tmp_path / "v.npz", cache=tmp_path / "cache")
    table = parquet.read_table(tmp_path / "v.parquet")
    assert parquet.ParquetFile(tmp_path / "v.parquet").num_row_groups == 18
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        assert np.array_equal(np.array(table["vector"].to_pylist(), np.float32), stored["vector"])
        assert table["path"].to_pylist() == stored["path"].tolist()


@pytest.mark.parametrize("name", ["v.txt", "v", "v.npy"])
def test_place_of_another_kind_is_refused_before_any_work(
    name: str, photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"\.parquet.*\.npz"):
        embed(photos, tmp_path / name)
    assert not (tmp_path / "cache").exists()


def test_nothing_is_overwritten(photos: Path, embed: Callable[..., Embedding], tmp_path: Path) -> None:
    (tmp_path / "v.npz").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        embed(photos, tmp_path / "v.npz")
    assert (tmp_path / "v.npz").read_text() == "mine"


def test_part_that_is_not_there_and_empty_folder_are_reported(
    photos: Path, embed: Callable[..., Embedding], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no test part"):
        embed(photos, tmp_path / "v.npz", part="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileProblem, match="no images"):
        embed(tmp_path / "empty", tmp_path / "v.npz")


def test_the_process_is_left_as_it_was(photos: Path, embed: Callable[..., Embedding], tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    embed(photos, tmp_path / "v.npz")
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32) == before
