"""`vitlab embed` and `vitlab predict` as typed."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_command import Command
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle and six photos."""
    folder, draw = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(folder / "bundle", Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee"), "card", {}))
    (folder / "photos").mkdir()
    for i in range(6):
        Image.fromarray(draw.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(folder / "photos" / f"{i}.png")
    return folder


def test_predict_prints_one_json_document(place: Path, call: Callable[..., Any]) -> None:
    printed = call("predict", str(place / "bundle"), str(place / "photos"), "--top", "1", "--json", "--device", "cpu")
    rows = json.loads(printed.out)
    assert printed.code == 0
    assert [Path(row["path"]).name for row in rows] == [f"{i}.png" for i in range(6)]
    assert all(row["top"][0]["label"] in ("ant", "bee") and row["top"][0]["p"] >= 0.5 for row in rows)
    assert "predict" in printed.err


def test_predict_prints_a_table(place: Path, call: Callable[..., Any]) -> None:
    printed = call("predict", str(place / "bundle"), str(place / "photos" / "*.png"), "--device", "cpu", "-q")
    assert (printed.code, printed.err) == (0, "")
    lines = printed.out.splitlines()
    assert len(lines) == 6
    assert all("ant" in line and "bee" in line and line.count("%") == 2 for line in lines)


def test_predict_exits_with_0_and_a_note_where_some_are_bad_and_with_1_where_all_are(
    place: Path, call: Callable[..., Any]
) -> None:
    good = str(place / "photos" / "0.png")
    printed = call("predict", str(place / "bundle"), "gone.png", good, "--json", "--device", "cpu")
    assert printed.code == 0
    assert [row["path"] for row in json.loads(printed.out)] == [good]
    assert "skipped gone.png: does not exist" in printed.err
    printed = call("predict", str(place / "bundle"), "gone.png", "--json", "--device", "cpu")
    assert (printed.code, printed.out) == (1, "")
    assert "gone.png does not exist" in printed.err


def test_predict_stores_its_answers(place: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("predict", str(place / "bundle"), str(place / "photos"), "--out", "a.csv", "--device", "cpu")
    printed = call(*arguments)
    assert printed.out.startswith("6 images in a.csv")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 6 * 2
    assert call(*arguments).code == 2  # nothing is overwritten


def test_embed_writes_a_file_and_computes_nothing_twice(place: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    base = ("embed", str(place / "bundle"), str(place / "photos"), "--cache", "cache", "--device", "cpu", "--json")
    first = call(*base, "--out", "a.npz")
    second = call(*base, "--out", "b.npz")
    assert (first.code, second.code) == (0, 0), first.err
    assert json.loads(first.out)["computed"] == 6
    assert json.loads(second.out)["computed"] == 0
    assert "img/s" in first.err
    assert "in the cache" in second.err
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("--out", "a.txt"), "should end in .parquet, .npz, .csv, .json"),
        (("--out", "a.npz", "--layers", "x"), "whole numbers separated by commas"),
        (("--out", "a.npz", "--layers", "9"), "there is no layer 9"),
        (("--out", "a.npz", "--tokens", "words"), "tokens"),
        (("--out", "a.npz", "--part", "test"), "there is no test part"),
        (("--out", "a.npz", "--batch-size", "0"), "--batch-size must be at least 1"),
        (("--out", "a.npz", "--workers", "-1"), "--workers at least 0"),
    ],
    ids=str,
)
def test_wrong_embed_exits_with_2_and_writes_nothing(
    options: tuple[str, ...], printed: str, place: Path, call: Callable[..., Any], tmp_path: Path
) -> None:
    found = call("embed", str(place / "bundle"), str(place / "photos"), "--cache", "c", "--device", "cpu", *options)
    assert found.code == 2
    assert printed in found.err
    assert "Traceback" not in found.err
    assert not (tmp_path / "a.npz").exists()


@pytest.mark.slow
def test_stopped_embed_resumes_where_it_was(place: Path, tmp_path: Path) -> None:
    """A real process, a real signal."""
    count, picture = 5000, (place / "photos" / "0.png").read_bytes()
    np.savez(
        tmp_path / "many.npz",
        data=np.frombuffer(picture * count, np.uint8),
        offsets=np.arange(count + 1) * len(picture),
        labels=np.zeros(count, np.int64),
        names=np.array([f"{i}.png" for i in range(count)]),
        classes=np.array(["ant"]),
    )
    arguments = ["embed", str(place / "bundle"), str(tmp_path / "many.npz"), "--out", str(tmp_path / "v.npz")]
    arguments += ["--cache", str(tmp_path / "cache"), "--device", "cpu", "--threads", "1", "--workers", "0", "--json"]
    process = Command(arguments, tmp_path)
    try:
        until = time.monotonic() + 100
        while not list((tmp_path / "cache").glob("*/*.npy")) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        code, out, err = process.end()
    finally:
        process.kill()
    assert (code, out) == (143, "")
    assert "the same command resumes from there" in err
    assert not (tmp_path / "v.npz").exists()
    code, out, _ = Command(arguments, tmp_path).end()
    assert code == 0
    reported = json.loads(out)
    assert reported["images"] == count
    assert 0 < reported["computed"] < count


def test_embed_prints_rows_as_json_or_names_the_option_it_lacks(place: Path, call: Callable[..., Any]) -> None:
    printed = call("embed", str(place / "bundle"), str(place / "photos"), "--json", "--device", "cpu")
    rows = json.loads(printed.out)
    assert [Path(row["path"]).name for row in rows] == [f"{i}.png" for i in range(6)]
    assert all(list(row) == ["path", "split", "label", "vector"] and len(row["vector"]) == 16 for row in rows)
    printed = call("embed", str(place / "bundle"), str(place / "photos"), "--device", "cpu")
    assert (printed.code, printed.out) == (2, "")
    assert "--out vectors.parquet" in printed.err and "--json" in printed.err


def test_embed_reads_a_table_by_the_names_of_its_columns(place: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    rows = [f"{place / 'photos' / f'{i}.png'},{'ab'[i % 2]}" for i in range(6)]
    (tmp_path / "list.csv").write_text("\n".join(["file,kind", *rows]) + "\n")
    words = ("embed", str(place / "bundle"), "list.csv", "--out", "v.npz", "--device", "cpu", "-q")
    assert "has no column 'path'; it has: file, kind" in call(*words).err
    printed = call(*words, "--columns", "path=file,label=kind")
    assert printed.code == 0, printed.err
    with np.load(tmp_path / "v.npz", allow_pickle=False) as stored:
        assert (stored["vector"].shape, stored["label"].tolist()) == ((6, 16), ["a", "b"] * 3)
