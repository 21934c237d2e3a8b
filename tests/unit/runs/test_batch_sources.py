"""`predict` and `embed` of images wherever they lie: shards, data sets and addresses, resumed, and held to what was kept."""

import csv
import functools
import http.server
import io
import re
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.core.errors import FileProblem, Unreachable, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources import addresses
from vitlab.evaluation import row_store
from vitlab.models.build import create_model
from vitlab.runs.evaluation.prediction import Predictions
from vitlab.weights.bundle import Bundle, save_bundle

fsspec = pytest.importorskip("fsspec", reason="the extra 'remote' is not installed")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

COUNT = 20


class Flaky(MemoryFileSystem):
    """A store in memory that fails as often as it should."""

    protocol = "flaky"
    failures = lists = 0  # reads and listings that will fail
    asked = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("flaky:"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        Flaky.asked += 1
        if Flaky.failures:
            Flaky.failures -= 1
            raise ConnectionResetError("slow down")
        return super().cat_file(path, start=start, end=end, **kwargs)

    def find(self, *given: Any, **kwargs: Any) -> Any:
        self._list()
        return super().find(*given, **kwargs)

    def glob(self, *given: Any, **kwargs: Any) -> Any:
        self._list()
        return super().glob(*given, **kwargs)

    def _list(self) -> None:
        if Flaky.lists:
            Flaky.lists -= 1
            raise ConnectionResetError("slow down")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b"
    model = create_model("ViT-w16d1m32h2/8", num_classes=3, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(path, Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee", "cat"), "card", {}))
    return path


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    draw, found = np.random.default_rng(0), dict[str, bytes]()
    for i in range(COUNT):
        picture = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (18, 20 + i % 3, 3), dtype=np.uint8)).save(picture, "PNG")
        found[f"{i:03d}.png"] = picture.getvalue()
    return found


@pytest.fixture
def photos(tmp_path: Path, files: dict[str, bytes]) -> Path:
    (tmp_path / "photos").mkdir()
    for name, data in files.items():
        (tmp_path / "photos" / name).write_bytes(data)
    return tmp_path / "photos"


def shard(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def memory(files: dict[str, bytes]) -> Any:
    """Stores in memory with two shards, and the same images as files beside a text."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    store, (first, second) = fsspec.filesystem("memory"), (list(files.items())[:12], list(files.items())[12:])
    store.pipe("/tars/a.tar", shard(dict(first)))
    store.pipe("/tars/b.tar", shard(dict(second)))
    store.pipe("/loose/readme.txt", b"none of them")
    for name, data in files.items():
        store.pipe(f"/loose/deep/{name}", data)
    Flaky.failures = Flaky.lists = Flaky.asked = 0
    yield store
    store.rm("/", recursive=True)


@pytest.fixture
def predict(bundle: Path, tmp_path: Path) -> Callable[..., Predictions]:
    def call(images: Any, **options: Any) -> Predictions:
        usual: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True, "workers": 0, "cache": tmp_path / "kept"}
        return vitlab.predict(bundle, images, **usual | options)

    return call


def tops(found: Predictions) -> list[Any]:
    return [row.top for row in found.rows]


# --- wherever they lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["memory://tars", "memory://loose", "memory://loose/deep/*.png", "memory://tars/*.tar", "flaky://tars"]
)
def test_images_at_an_address_are_answered_as_those_of_a_folder(
    where: str, memory: Any, photos: Path, predict: Callable[..., Predictions]
) -> None:
    found = predict(where)
    assert tops(found) == tops(predict(photos))
    names = [row.path.rsplit("/", 1)[-1].removesuffix(".png") for row in found.rows]
    assert names == [f"{i:03d}" for i in range(COUNT)]


def test_addresses_are_read_by_worker_processes_too(
    photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "a.tar").write_bytes(
        shard({path.name: path.read_bytes() for path in sorted(photos.iterdir())})
    )
    wanted = tops(predict(photos, batch_size=4))
    for where in (f"file://{tmp_path}/tars", f"file://{photos}"):
        assert tops(predict(where, workers=2, batch_size=4)) == wanted


def test_shards_files_and_addresses_are_taken_in_their_order(
    memory: Any, photos: Path, predict: Callable[..., Predictions]
) -> None:
    files = sorted(photos.iterdir())
    found = predict([files[3], "memory://tars/b.tar", files[1]])
    assert [row.path for row in found.rows] == [str(files[3]), *(f"{i:03d}" for i in range(12, COUNT)), str(files[1])]
    assert tops(found) == tops(predict([files[3], *files[12:], files[1]]))


def test_data_set_by_name_and_part_is_answered(
    photos: Path, tmp_path: Path, predict: Callable[..., Predictions]
) -> None:
    rows = [[f"photos/{path.name}", "val" if i % 2 else "train"] for i, path in enumerate(sorted(photos.iterdir()))]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "split"], *rows])
    assert len(predict(tmp_path / "table.csv").rows) == COUNT
    assert [row.path for row in predict(tmp_path / "table.csv", part="val").rows] == [
        path for path, part in rows if part == "val"
    ]
    with pytest.raises(UsageError, match="no test part"):
        predict(tmp_path / "table.csv", part="test")


def test_embed_takes_shards_without_labels_from_a_store(
    bundle: Path, memory: Any, photos: Path, tmp_path: Path
) -> None:
    usual: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True, "workers": 0, "cache": tmp_path / "kept"}
    stored, local = (vitlab.embed(bundle, where, **usual).rows for where in ("memory://tars", photos))
    assert [row["vector"] for row in stored] == [row["vector"] for row in local]
    assert {row["label"] for row in stored} == {""}


def test_address_without_images_is_reported(memory: Any, predict: Callable[..., Predictions]) -> None:
    memory.pipe("/texts/a.txt", b"a")
    for where in ("memory://texts", "memory://nothing"):
        with pytest.raises(FileProblem, match="holds no images"):
            predict(where)


# --- kept -------------------------------------------------------------------------------------------------------------


def test_second_file_costs_nothing_and_a_changed_shard_is_answered_anew(
    memory: Any, files: dict[str, bytes], predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    first, second = predict("memory://tars", out=tmp_path / "a.csv"), predict("memory://tars", out=tmp_path / "b.csv")
    assert (first.computed, second.computed) == (COUNT, 0)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert list(second.rows) == list(first.rows) == predict("memory://tars").rows
    memory.pipe("/tars/b.tar", shard(dict.fromkeys(list(files)[12:], files["000.png"])))
    assert predict("memory://tars", out=tmp_path / "c.csv").computed == COUNT
    assert predict("memory://tars", top=1, out=tmp_path / "d.csv").computed == COUNT, "more answers are other answers"


def test_answers_of_a_file_are_a_sequence(photos: Path, predict: Callable[..., Predictions], tmp_path: Path) -> None:
    stored, plain = predict(photos, out=tmp_path / "a.json").rows, predict(photos).rows
    assert len(stored) == COUNT
    assert stored[3] == plain[3] and stored[-1] == plain[-1]
    assert stored[2:9:3] == plain[2:9:3]
    with pytest.raises(IndexError):
        _ = stored[COUNT]


def test_reason_of_a_bad_image_outlives_the_call(
    memory: Any, predict: Callable[..., Predictions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_store, "CHUNK_ROWS", 8)
    memory.pipe("/loose/deep/004.png", b"no picture")
    memory.pipe("/loose/deep/015.png", b"")
    first = predict("memory://loose", out=tmp_path / "a.csv")
    again = predict("memory://loose", out=tmp_path / "b.csv")
    assert first.computed == COUNT and again.computed == 0
    assert dict(first.bad) == dict(again.bad)
    assert list(again.bad) == ["memory:///loose/deep/004.png", "memory:///loose/deep/015.png"]
    assert "empty" in again.bad["memory:///loose/deep/015.png"]
    assert "004.png" not in (tmp_path / "b.csv").read_text()


# --- stores that fail -------------------------------------------------------------------------------------------------


def test_read_that_fails_is_tried_again(
    memory: Any, photos: Path, predict: Callable[..., Predictions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_S", (0.0, 0.0, 0.0))
    Flaky.failures = 3
    assert tops(predict("flaky://loose")) == tops(predict(photos))
    assert Flaky.asked == COUNT + 3


@pytest.mark.parametrize("address", ["flaky://loose", "flaky://loose/deep/*.png", "flaky://tars", "flaky://tars/*.tar"])
def test_listing_that_fails_is_tried_again(
    address: str, memory: Any, photos: Path, predict: Callable[..., Predictions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_S", (0.0, 0.0, 0.0))
    Flaky.lists = 3
    assert tops(predict(address)) == tops(predict(photos))
    assert Flaky.lists == 0
    Flaky.lists = 10_000
    with pytest.raises(Unreachable, match="4 attempts"):
        predict(address)


@pytest.mark.parametrize("workers", [0, 1])
def test_store_that_does_not_answer_makes_no_image_bad(
    workers: int,
    memory: Any,
    predict: Callable[..., Predictions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "_PAUSES_S", (0.0,))
    Flaky.failures = 10_000
    with pytest.raises(Unreachable, match=r"^flaky:///loose/deep/\d+.png cannot be read: ConnectionResetError"):
        predict("flaky://loose", out=tmp_path / "a.csv", workers=workers)
    Flaky.failures = 0
    found = predict("flaky://loose", out=tmp_path / "a.csv")
    assert (len(found.rows), dict(found.bad)) == (COUNT, {})


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, and parts of them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        wanted, path = (
            re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")),
            Path(self.translate_path(self.path)),
        )
        if wanted is None or not path.is_file() or not self.server.knows_ranges:  # pyright: ignore
            return super().do_GET()
        first, last, size = int(wanted[1]), int(wanted[2]), path.stat().st_size
        part = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None


@pytest.fixture
def web(photos: Path) -> Any:
    """A server on this machine, with the photos and a shard of them."""
    (photos.parent / "tars").mkdir()
    images = {path.name: path.read_bytes() for path in sorted(photos.iterdir())}
    (photos.parent / "tars" / "a.tar").write_bytes(shard(images))
    handler = functools.partial(Ranges, directory=str(photos.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.knows_ranges, server.daemon_threads = True, True  # pyright: ignore
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_web_server_is_asked_again_after_workers_have_asked_it(
    web: Any, photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    """A worker is a copy of its parent, connections included, and must not close them."""
    pytest.importorskip("aiohttp", reason="the extra 'http' is not installed")
    wanted, host = tops(predict(photos, batch_size=4)), f"http://127.0.0.1:{web.server_address[1]}"
    for where in ("tars/a.tar", "photos/", "tars/"):
        assert tops(predict(f"{host}/{where}", workers=2, batch_size=4)) == wanted, where
    web.knows_ranges = False
    with pytest.raises(Unreachable, match="sends the whole file"):
        predict(f"{host}/tars/a.tar")
