"""From a name to predictions: a real server on this machine, a small checkpoint, an empty cache."""

import os
import re
import threading
from collections.abc import Callable, Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.core import download, fsio
from vitlab.core.environment import CACHE_VARIABLE, OFFLINE_VARIABLE
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle
from vitlab.weights.catalogue import CATALOGUE_VARIABLE, find
from vitlab.weights.containers import npz_chunks, read_arrays
from vitlab.weights.targets import write_foreign

NAME = "ViT-mu/16@ours"
PICTURE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
RULE = Preprocess(image_size=(32, 32), resize="shorter-side", crop_frac=0.875, antialias=False)
Describe = Callable[..., None]


class Handler(SimpleHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFFLINE_VARIABLE, raising=False)


@pytest.fixture
def model() -> torch.nn.Module:
    return create_model("ViT-mu/16", num_classes=5, image_size=32, seed=3).eval()


@pytest.fixture
def requests() -> list[str]:
    return []


@pytest.fixture
def describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, requests: list[str]
) -> Generator[Describe]:
    """Serves the model's file. Calling it writes a catalogue that knows it, with some words replaced."""
    (tmp_path / "site").mkdir()
    labels = tuple("abcde")
    write_foreign(Bundle(model, RULE, labels, "", {}), tmp_path / "site" / "mu.npz", "google-npz")
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(tmp_path / "own.toml"))
    handler = partial(type("Bound", (Handler,), {"requests": requests}), directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

        def write(**replaced: str) -> None:
            text = f"""
[[family]]
tag = "ours"
title = "Ours"
format = "google-npz"
folder = "http://127.0.0.1:{server.server_port}/"
sources = ["our own"]
spec = {{ image_size = [32, 32], num_classes = 5 }}
preprocess = {{ image_size = [32, 32], resize = "shorter-side", crop_frac = 0.875, antialias = false }}
checkpoints = [{{ model = "ViT-mu/16", file = "mu.npz" }}]
"""
            for old, new in replaced.items():
                text = text.replace(old, new)
            (tmp_path / "own.toml").write_text(text)

        write()
        yield write
        server.shutdown()


def test_name_is_loaded_once_and_then_without_the_server(
    describe: Describe, requests: list[str], model: torch.nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    first = vitlab.load(NAME, device="cpu")
    printed = capsys.readouterr().err
    assert "/mu.npz -> " in printed
    assert "assumed" not in printed
    assert first.preprocess == RULE
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.state_dict().values(), first.model.state_dict().values(), strict=True)
    )
    second = vitlab.load(find(NAME).alias, device="cpu", quiet=True)
    assert capsys.readouterr().err == ""
    assert torch.equal(first.logits([PICTURE]), second.logits([PICTURE]))
    assert requests == ["/mu.npz"]


def test_hash_of_the_first_download_is_held_to(describe: Describe) -> None:
    vitlab.load(NAME, device="cpu", quiet=True)
    path = find(NAME).path
    record = path.with_name("mu.npz.sha256")
    assert sorted(path.parent.iterdir()) == [path, record]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileProblem, match=f"damaged: its SHA-256 .* {record.read_text().strip()}"):
        vitlab.load(NAME, quiet=True)


def test_bad_first_file_does_not_lock_the_name(describe: Describe, tmp_path: Path) -> None:
    good = (tmp_path / "site" / "mu.npz").read_bytes()
    path = find(NAME).path
    for bad in (b"<html>no such file</html>", good[:-100]):
        (tmp_path / "site" / "mu.npz").write_bytes(bad)
        with pytest.raises(FileProblem):
            vitlab.load(NAME, quiet=True)
        assert [file.name for file in path.parent.iterdir()] == ["mu.npz"], "nothing was recorded"
        path.unlink()
    (tmp_path / "site" / "mu.npz").write_bytes(good)
    vitlab.load(NAME, device="cpu", quiet=True)


def test_damaged_file_is_loaded_again_once_it_is_deleted(describe: Describe) -> None:
    vitlab.load(NAME, device="cpu", quiet=True)
    path = find(NAME).path
    record = path.with_name("mu.npz.sha256")
    record.write_text("0" * 64)
    with pytest.raises(FileProblem, match=r"Delete it and mu\.npz\.sha256 beside it"):
        vitlab.load(NAME, quiet=True)
    path.unlink()
    vitlab.load(NAME, device="cpu", quiet=True)
    assert record.read_text().strip() == fsio.hash_file(path)


def test_cache_that_cannot_be_written_is_used(describe: Describe, tmp_path: Path) -> None:
    path = find(NAME).path
    path.parent.mkdir(parents=True)
    path.write_bytes((tmp_path / "site" / "mu.npz").read_bytes())

    def refuse(operation: fsio.Operation, place: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with fsio.intercept(refuse):
        assert vitlab.load(NAME, device="cpu", quiet=True).model.spec.num_classes == 5
    assert list(path.parent.iterdir()) == [path]


def test_leaving_something_out_does_not_skip_the_comparison(describe: Describe, tmp_path: Path) -> None:
    arrays = {**read_arrays(tmp_path / "site" / "mu.npz").arrays, "step": torch.zeros(1)}
    (tmp_path / "site" / "mu.npz").write_bytes(b"".join(npz_chunks(arrays)))
    describe(**{"num_classes = 5": "num_classes = 6"})
    with pytest.raises(FileProblem, match="num_classes is 5, and 6 was expected"):
        vitlab.convert(NAME, tmp_path / "x", drop=["step"])
    describe()
    assert vitlab.convert(NAME, tmp_path / "x", drop=["step", "head"]).unexpected == ("step",)


def test_hash_of_the_catalogue_is_checked_before_anything_is_kept(describe: Describe) -> None:
    describe(**{'"mu.npz"': f'"mu.npz", sha256 = "{"0" * 64}"'})
    with pytest.raises(FileProblem, match=f"SHA-256 [0-9a-f]+, and {'0' * 64} was expected"):
        vitlab.load(NAME, quiet=True)
    assert list(find(NAME).path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("num_classes = 5", "num_classes = 6", "num_classes is 5, and 6"),
        ("32, 32], num", "48, 48], num", r"image_size is \(32, 32\), and \(48, 48\)"),
        ("ViT-mu/16", "ViT-Ti/16", "model is ViT-mu/16, and ViT-Ti/16"),
        ("google-npz", "big-vision", "format is google-npz, and big-vision"),
    ],
)
def test_file_that_contradicts_the_catalogue_is_refused(describe: Describe, old: str, new: str, fact: str) -> None:
    describe(**{old: new})
    with pytest.raises(FileProblem, match=f"{fact} was expected"):
        vitlab.load(NAME.replace("ViT-mu/16", new) if old == "ViT-mu/16" else NAME, quiet=True)


def test_no_connection_says_what_to_bring_and_where_to_put_it(describe: Describe) -> None:
    describe(**{'"mu.npz"': '"sub/mu.npz?token=secret"', "http://127.0.0.1": "http://127.0.0.1:1/"})
    with pytest.raises(FileProblem, match=f"{NAME} is not on this machine: ") as caught:
        vitlab.load(NAME, quiet=True)
    assert re.fullmatch(
        rf"Run it again, or download http://127\.0\.0\.1:1/\S+/mu\.npz elsewhere and save it as {find(NAME).path}",
        caught.value.hint or "",
    )
    assert "secret" not in str(caught.value)


def test_unknown_address_says_where_to_put_the_file_and_takes_it_there(describe: Describe, tmp_path: Path) -> None:
    describe(folder="licence")
    path = find(NAME).path
    with pytest.raises(FileProblem, match="its address is not known") as caught:
        vitlab.load(NAME, quiet=True)
    assert caught.value.hint == f"Save mu.npz as {path}"
    path.parent.mkdir(parents=True)
    path.write_bytes((tmp_path / "site" / "mu.npz").read_bytes())
    assert vitlab.load(NAME, device="cpu", quiet=True).model.spec.num_classes == 5


def test_convert_takes_a_name_and_keeps_licence_and_preprocessing(describe: Describe, tmp_path: Path) -> None:
    describe(sources='licence = "Ours-1.0"\nsources')
    report = vitlab.convert(NAME, tmp_path / "bundle")
    assert (report.source, report.model, report.unexpected) == ("google-npz", "ViT-mu/16", ())
    bundle = vitlab.load(tmp_path / "bundle", device="cpu", quiet=True).bundle
    assert bundle.preprocess == RULE
    assert "| licence | Ours-1.0 |" in bundle.card
    assert f"# {NAME}" in bundle.card


def test_existing_file_of_that_name_comes_first(
    describe: Describe, tmp_path: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ViT-mu").mkdir()
    (tmp_path / NAME).write_bytes(b"not weights")
    with pytest.raises(FileProblem):
        vitlab.load(NAME, quiet=True)
    assert requests == []


def test_slips_are_answered(describe: Describe) -> None:
    with pytest.raises(UnknownName, match="Nearest: ViT-mu/16@ours"):
        vitlab.load("ViT-mu/16@our")
    with pytest.raises(UsageError, match="the catalogue has its preprocessing"):
        vitlab.load(NAME, preprocess="imagenet")


REAL = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data")) / "dinov2_vits14"
REAL_FILE = REAL / "dinov2_vits14_fp16.safetensors"


@pytest.mark.skipif(not REAL_FILE.is_file(), reason="needs the DINOv2 weights in VITLAB_DATA")
@pytest.mark.slow
def test_real_weights_are_what_the_catalogue_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta's arrays in another container and half precision: what is read from them must still agree with the entry."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    path = find("ViT-S/14@dinov2").path
    path.parent.mkdir(parents=True)
    path.symlink_to(REAL_FILE)
    loaded = vitlab.load("ViT-S/14@dinov2", device="cpu", quiet=True)
    assert loaded.preprocess.image_size == (224, 224)
    assert loaded.embed([PICTURE]).shape == (1, 384)
    (tmp_path / "weights" / "vit-s-14@dinov2-registers").mkdir()
    find("ViT-S/14@dinov2-registers").path.symlink_to(REAL_FILE)
    with pytest.raises(FileProblem, match="registers is 0, and 4 was expected"):
        vitlab.load("ViT-S/14@dinov2-registers", device="cpu", quiet=True)
