"""Named sets: the table itself, the order of looking, and a download from a server on this machine."""

import functools
import gzip
import hashlib
import http.server
import os
import re
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from vitlab.core import download
from vitlab.core.console import Console
from vitlab.core.environment import OFFLINE_VARIABLE
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.sources import named
from vitlab.data.sources.named import NamedSet, PublishedFile, find_named, list_data, named_sets
from vitlab.data.sources.named_opening import LAYOUTS, open_named
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.synsets import ilsvrc_synsets

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data")).absolute()
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFFLINE_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def empty_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def test_the_table_is_whole() -> None:
    names = [name for known in named_sets().values() for name in (known.name, *known.aliases)]
    assert len(names) == len(set(names)) and all(name == name.casefold().replace("_", "-") for name in names)
    for known in named_sets().values():
        assert known.name == named.BUILT_IN or known.packed or known.layout in LAYOUTS
        assert set(known.parts) <= {"train", "val", "test", "all"}
        assert known.page.startswith("http") and known.source
        for file in known.files:
            assert file.url is None or re.match(r"https?://", file.url)
            assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert Path(file.name).name == file.name
    assert set(LAYOUTS) == {known.layout for known in named_sets().values()} - {""}, "every layout has its set"


@pytest.mark.parametrize("name", ["oxford-pets", "Oxford_Pets", "PETS", "oxford_iiit_pet"])
def test_names_and_aliases(name: str) -> None:
    assert find_named(name).title == "Oxford-IIIT Pet"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown data set 'cifar1O'\nNearest: cifar10"):
        open_named("cifar1O")


def fashion(folder: Path, count: int = 20) -> dict[str, bytes]:
    """A whole small Fashion-MNIST in the published form."""
    rng = np.random.default_rng(0)
    head = np.array([count, 28, 28], ">u4").tobytes()
    images = b"\0\0\x08\3" + head + rng.integers(0, 255, count * 784).astype(np.uint8).tobytes()
    labels = b"\0\0\x08\1" + head[:4] + bytes(i % 10 for i in range(count))
    kinds = {"images-idx3-ubyte.gz": images, "labels-idx1-ubyte.gz": labels}
    files = {f"{stem}-{kind}": gzip.compress(data) for stem in ("train", "t10k") for kind, data in kinds.items()}
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def test_the_data_folder_comes_before_the_cache_and_is_left_as_it_is(tmp_path: Path) -> None:
    fashion(tmp_path / "data" / "fashion_mnist", 20)
    fashion(tmp_path / "cache" / "data" / "fashion_mnist", 30)
    opened = open_named("fashion-mnist", download=False)
    assert len(opened.part("test")) == 20
    assert "fashion-mnist: train has 20 of the official 60,000 images" in opened.notes
    assert len(list((tmp_path / "data" / "fashion_mnist").iterdir())) == 4
    (tmp_path / "data" / "fashion_mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert len(open_named("fashion-mnist", download=False).part("test")) == 30


def test_a_set_may_lie_in_both_places_together(tmp_path: Path) -> None:
    fashion(tmp_path / "data" / "fashion_mnist")
    (tmp_path / "cache/data/fashion_mnist").mkdir(parents=True)
    moved = tmp_path / "data/fashion_mnist/t10k-images-idx3-ubyte.gz"
    moved.rename(tmp_path / "cache/data/fashion_mnist" / moved.name)
    assert len(open_named("fashion-mnist", download=False).part("test")) == 20


def test_list_says_what_is_there_and_what_can_be(tmp_path: Path) -> None:
    fashion(tmp_path / "data" / "fashion_mnist")
    rows = {row.name: row for row in list_data()}
    assert (rows["fashion-mnist"].state, rows["fashion-mnist"].where) == (
        "present",
        str(tmp_path / "data/fashion_mnist"),
    )
    assert (rows["cifar100"].state, rows["imagenet"].state) == ("download", "by hand")
    assert rows["cifar100"].where == str(tmp_path / "cache/data/cifar100")
    assert rows["digits"].state == "present"
    assert rows["imagenet"].files == ("val",), "what cannot be done without"
    assert (rows["fractals"].state, rows["shapes"].classes) == ("synthetic", 8)
    assert set(rows) == {*named_sets(), "fractals", "shapes"}


def test_what_must_be_put_where_is_listed_file_by_file(tmp_path: Path) -> None:
    with pytest.raises(FileProblem) as caught:
        open_named("imagenet")
    assert str(tmp_path / "cache/data/imagenet") in str(caught.value)
    assert "train or ILSVRC2012_img_train.tar or ILSVRC/Data/CLS-LOC/train (optional)" in str(caught.value)
    (tmp_path / "cache/data/sun397/SUN397").mkdir(parents=True)
    with pytest.raises(FileProblem) as caught:
        open_named("sun397")
    assert "SUN397.tar.gz" not in str(caught.value), "it is there already"
    assert "sun397_tfds_va.txt" in str(caught.value)
    with pytest.raises(FileProblem, match=r"Put hymenoptera_train\.npz, hymenoptera_val\.npz into"):
        open_named("hymenoptera")


def test_other_classes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "eurosat" / "2750" / "River"
    folder.mkdir(parents=True)
    (folder / "River_1.jpg").touch()
    with pytest.raises(FileProblem, match=r"\b1 class.*EuroSAT, colours.*\b10\b"):
        open_named("eurosat")


def test_digits_are_built_in() -> None:
    digits = open_named("digits").part("all")
    assert (len(digits), len(digits.classes), np.asarray(digits.read(0)).shape) == (1797, 10, (8, 8, 1))


def test_imagenet_a_is_opened_by_name_with_its_200_synsets(tmp_path: Path) -> None:
    for wnid in list(ilsvrc_synsets())[:200]:
        folder = tmp_path / "data" / "imagenet_a" / "imagenet-a" / wnid
        folder.mkdir(parents=True)
        (folder / "0.jpg").touch()
    opened = open_named("imagenet-a", download=False)
    assert (len(opened.classes), len(opened.part("test"))) == (200, 200)
    assert "imagenet-a: test has 200 of the official 7,500 images" in opened.notes


def test_corruptions_are_opened_together_or_one_by_one(tmp_path: Path) -> None:
    for kind in ("fog", "frost", "saturate"):
        for severity in range(1, 6):
            folder = tmp_path / "data" / "imagenet_c" / kind / str(severity) / "n01440764"
            folder.mkdir(parents=True)
            (folder / "ILSVRC2012_val_00000293.JPEG").touch()
    assert len(open_named("imagenet-c").part("test")) == 10, "the extra kinds are not in the mean of the fifteen"
    assert len(open_data("imagenet-c:fog").part("test")) == 5
    assert open_data("imagenet-c:saturate/3").part("test").keys == ["saturate/3/n01440764/ILSVRC2012_val_00000293.JPEG"]
    assert open_named("imagenet-c:fog").notes == ()
    with pytest.raises(UsageError, match=r"no images of snow\s+Available: fog, frost, saturate"):
        open_named("imagenet-c:snow")
    with pytest.raises(UnknownName, match="Only imagenet-c takes a part"):
        open_named("cifar10:cat")


def test_what_imagenet_c_wants_is_listed_with_a_path(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"gaussian_noise/1/n01440764/ILSVRC2012_val_00000293\.JPEG inside"):
        open_named("imagenet-c")
    with pytest.raises(FileProblem, match=r"sketch/n01440764/sketch_0\.JPEG inside"):
        open_named("imagenet-sketch")


# --- download ---------------------------------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Generator[str]:
    (tmp_path / "site").mkdir()
    handler = functools.partial(Handler, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def offer(monkeypatch: pytest.MonkeyPatch, address: str, files: dict[str, bytes]) -> None:
    """Puts a set into the table whose files lie at `address`."""
    published = tuple(
        PublishedFile(name, (), f"{address}/{name}", size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    )
    about = {
        "title": "Tiny",
        "classes": 10,
        "parts": {},
        "page": "http://page",
        "source": "us",
        "layout": "fashion_mnist",
    }
    table = {"tiny": NamedSet(name="tiny", folder="tiny", files=published, **about)}  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(named, "named_sets", lambda: table)


def test_what_is_missing_is_fetched_checked_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    files = fashion(tmp_path / "made")
    for name, data in files.items():
        (tmp_path / "site" / name).write_bytes(data)
    offer(monkeypatch, site, files)
    with pytest.raises(FileProblem, match="Tiny is not here"):
        open_named("tiny", download=False)
    assert len(open_named("tiny", console=QUIET).part("train")) == 20
    (tmp_path / "site" / "train-images-idx3-ubyte.gz").unlink()
    assert len(open_named("tiny", console=QUIET).part("train")) == 20, "it is here now"
    assert list_data()[0].state == "present"


def test_data_folder_that_is_not_there_is_reported_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    files = fashion(tmp_path / "made")
    for name, data in files.items():
        (tmp_path / "site" / name).write_bytes(data)
    offer(monkeypatch, site, files)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "absent"))
    with pytest.raises(FileProblem, match=r"VITLAB_DATA .*absent.*not a folder"):
        open_named("tiny", console=QUIET)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path))
    open_named("tiny", console=QUIET)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "absent"))
    assert len(open_named("tiny", console=QUIET).part("train")) == 20, "what is in the cache needs no other folder"


def test_a_file_that_is_not_what_was_published_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    files = fashion(tmp_path / "made")
    for name, data in files.items():
        (tmp_path / "site" / name).write_bytes(data[::-1])
    offer(monkeypatch, site, files)
    with pytest.raises(FileProblem, match=r"(?s)could not be fetched.*SHA-256.*Put these into"):
        open_named("tiny", console=QUIET)


def test_without_a_net_the_message_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        offer(monkeypatch, f"http://127.0.0.1:{free.getsockname()[1]}", {"a.gz": b"data"})
        with pytest.raises(FileProblem) as caught:
            open_named("tiny", console=QUIET)
    assert "could not be fetched" in caught.value.what
    assert f"Put these into {tmp_path / 'cache/data/tiny'}" in str(caught.value) and "a.gz" in str(caught.value)


# --- real sets --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / "oxford_pets").is_dir(), reason="needs the packed sets in VITLAB_DATA")
@pytest.mark.parametrize(
    ("name", "parts", "classes"),
    [
        ("oxford-pets", {"train": 3_680, "test": 3_669}, 37),
        ("tiny-imagenet", {"train": 20_000, "val": 2_000}, 200),
        ("hymenoptera", {"train": 243, "val": 153}, 2),
        ("imagenet-samples", {"all": 850}, 1000),
    ],
)
def test_real_packed_sets(monkeypatch: pytest.MonkeyPatch, name: str, parts: dict[str, int], classes: int) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(DATA))
    opened = open_named(name, download=False)
    assert {part: len(of) for part, of in opened.parts.items()} == parts
    assert len(opened.classes) == classes
    assert bytes(opened.part(*parts).read(0)[:2]) == b"\xff\xd8", "a JPEG"


def test_offline_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    with pytest.raises(FileProblem, match=OFFLINE_VARIABLE):
        open_named("cifar10", console=Console(quiet=True))
