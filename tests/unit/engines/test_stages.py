"""Stages of a pipeline, without the pipeline: columns in, columns out, one model per process, bad images as rows."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

import vitlab
from vitlab.core.errors import Unreachable, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.engines import stages
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

LABELS = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bundle") / "b"
    model = create_model("ViT-w16d1m32h2/8", num_classes=3, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(path, Bundle(model, Preprocess(image_size=(16, 16)), LABELS, "card", {}))
    return str(path)


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    draw, found = np.random.default_rng(0), list[bytes]()
    for i in range(6):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (18, 20 + i, 3), dtype=np.uint8)).save(file, "PNG")
        found.append(file.getvalue())
    return found


def column(values: list[Any]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_ragged_pixels_are_a_row_with_a_reason_and_a_store_that_is_down_is_not(
    bundle: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = column([column([[1, 2], [3]]), pictures[0]])
    found = vitlab.Embedder(bundle, device="cpu")({"image": ragged})
    assert "pixels" in found["error"][0] and found["error"][1] is None

    def down(address: str) -> bytes:
        raise Unreachable(f"{address} cannot be read")

    monkeypatch.setattr(stages, "read_address", down)
    with pytest.raises(Unreachable):
        vitlab.Embedder(bundle, device="cpu")({"path": column(["s3://bucket/a.jpg"])})


def test_vectors_and_labels_are_those_of_the_classifier(bundle: str, pictures: list[bytes]) -> None:
    clf = vitlab.load(bundle, device="cpu", quiet=True)
    batch = {"id": np.arange(6), "bytes": column(pictures)}
    vectors = vitlab.Embedder(bundle, device="cpu")(batch)
    labels = vitlab.Predictor(bundle, device="cpu")(batch)
    assert list(vectors) == ["id", "bytes", "vector", "error"]
    np.testing.assert_array_equal(vectors["vector"], clf.embed(pictures).numpy())
    answers = clf(pictures)
    assert labels["label"].tolist() == [row[0].label for row in answers]
    np.testing.assert_allclose(labels["p"], [row[0].p for row in answers], rtol=1e-6)
    assert list(batch) == ["id", "bytes"], "the batch of the caller is as it was"


def test_bad_images_are_rows_with_a_reason(bundle: str, pictures: list[bytes]) -> None:
    batch = {"bytes": column([pictures[0], b"no picture", b"", None, 7, pictures[1]])}
    for stage in (vitlab.Embedder(bundle, device="cpu"), vitlab.Predictor(bundle, device="cpu", top=2)):
        found = stage(batch)
        assert [error is None for error in found["error"]] == [True, False, False, False, False, True]
        assert "empty" in found["error"][2] and "missing" in found["error"][3] and "int" in found["error"][4]
    vectors, labels = (stage(batch) for stage in (vitlab.Embedder(bundle), vitlab.Predictor(bundle, top=2)))
    assert np.isnan(vectors["vector"]).all(axis=1).tolist() == [False, True, True, True, True, False]
    assert labels["label"][1] == ["", ""] and np.isnan(labels["p"][1]).all()
    assert set(labels["label"][0]) <= set(LABELS)
    alone = vitlab.Embedder(bundle)({"bytes": column([pictures[0], *[pictures[2]] * 4, pictures[1]])})
    np.testing.assert_array_equal(vectors["vector"][[0, 5]], alone["vector"][[0, 5]])  # beside bad ones, the same bits


def test_bytes_pixels_paths_and_addresses_give_the_same(bundle: str, pictures: list[bytes], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
    stage, same = vitlab.Embedder(bundle, device="cpu"), pictures[:1] * 3
    pixels = [np.asarray(Image.open(io.BytesIO(data))) for data in same]
    (tmp_path / "a.png").write_bytes(same[0])
    fsspec.filesystem("memory").pipe("/stage/a.png", same[0])
    wanted = stage({"bytes": column(same)})["vector"]
    for batch in (
        {"image": np.stack(pixels)},
        {"image": column(pixels)},
        {"path": np.array([str(tmp_path / "a.png")] * 3)},
        {"path": column(["memory://stage/a.png"] * 3)},
    ):
        np.testing.assert_array_equal(stage(batch)["vector"], wanted)
    named = vitlab.Embedder(bundle, column="photo", output="v")({"photo": column(same), "path": column(["x"] * 3)})
    np.testing.assert_array_equal(named["v"], wanted)
    fsspec.filesystem("memory").rm("/stage", recursive=True)


def test_tables_of_pandas_and_pyarrow_stay_what_they_are(bundle: str, pictures: list[bytes]) -> None:
    given = [*pictures[:2], b"no picture"]
    plain = vitlab.Embedder(bundle)({"bytes": column(given)})
    frame = vitlab.Embedder(bundle)(pd.DataFrame({"bytes": given}))
    table = vitlab.Embedder(bundle)(pa.table({"bytes": given}))
    assert isinstance(frame, pd.DataFrame) and isinstance(table, pa.Table)
    np.testing.assert_array_equal(np.stack(list(frame["vector"])), plain["vector"])
    np.testing.assert_array_equal(np.array(table.column("vector").to_pylist()), plain["vector"])
    assert table.column("error").to_pylist() == list(plain["error"]) == [None, None, frame["error"][2]]
    several = vitlab.Predictor(bundle, top=2)(pa.table({"bytes": given}))
    assert several.column("label").to_pylist()[2] == ["", ""]


def test_labels_that_an_image_has_are_a_list(bundle: str, pictures: list[bytes], tmp_path: Path) -> None:
    import dataclasses

    whole = read_bundle(Path(bundle))
    save_bundle(tmp_path / "several", dataclasses.replace(whole, thresholds=(0.0, 0.0, 0.0)))
    found = vitlab.Predictor(tmp_path / "several", device="cpu")({"bytes": column([*pictures, b"no"])})
    answers = vitlab.load(tmp_path / "several", device="cpu", quiet=True)(pictures, top=3)
    assert [set(row) for row in found["labels"][:-1]] == [{each.label for each in row if each.has} for row in answers]
    assert found["labels"][-1] == []


def test_stage_is_pickled_as_its_settings_and_a_process_loads_once(bundle: str, pictures: list[bytes]) -> None:
    stage = vitlab.Embedder(bundle, device="cpu")
    stages._loaded.cache_clear()
    wanted = stage({"bytes": column(pictures)})["vector"]
    packed = pickle.dumps(stage)
    assert len(packed) < 1000, "without the model"
    for _ in range(3):
        np.testing.assert_array_equal(pickle.loads(packed)({"bytes": column(pictures)})["vector"], wanted)
    assert stages._loaded.cache_info().misses == 1


def test_wrong_calls_are_refused(bundle: str, pictures: list[bytes]) -> None:
    with pytest.raises(UsageError, match="none of the columns bytes, image, path"):
        vitlab.Embedder(bundle)({"photo": column(pictures)})
    with pytest.raises(UsageError, match="no column photo"):
        vitlab.Embedder(bundle, column="photo")({"bytes": column(pictures)})
    with pytest.raises(UsageError, match="top must be at least 1"):
        vitlab.Predictor(bundle, top=0)
    with pytest.raises(UsageError, match="a batch is"):
        vitlab.Embedder(bundle)(pictures)
    vitlab.Embedder(os.devnull)  # nothing is read before the first batch
