"""Features of a set: computed once, kept in whole chunks, gone on with after an interruption, never mistaken for others."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset, from_arrays, single_labels
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.engines import inference
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation import row_store
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.evaluation.row_store import ImageRows, RowStore, RowWork, compute_rows, pick_rows
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle

QUIET = Console(quiet=True)
ALONE = World(0, 1, torch.device("cpu"))
RULE = Preprocess(image_size=(8, 8))


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "CHUNK_ROWS", 8)


def pictures(count: int, seed: int = 0) -> Dataset:
    draw = np.random.default_rng(seed)
    return from_arrays(draw.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8), np.arange(count) % 3, ("a", "b", "c"))  # pyright: ignore


class Counted:
    """A real function of the pixels that counts the images it was given."""

    def __init__(self) -> None:
        self.images = 0
        self.weight = torch.randn(192, 5, generator=torch.Generator().manual_seed(0))

    def __call__(self, x_BCYX: Tensor) -> Tensor:
        self.images += len(x_BCYX)
        return x_BCYX.flatten(1) @ self.weight


def extracted(describe: Callable[[Tensor], Tensor], dataset: Dataset, folder: Path, **changes: Any) -> ImageRows:
    options = InferenceOptions(**{"batch_size": 16, "workers": 0} | changes)
    return compute_rows(
        RowWork(describe, RULE), dataset, options, store=RowStore(folder, {}), world=ALONE, console=QUIET
    )


def together(found: ImageRows) -> Tensor:
    return torch.cat([chunk.clone() for chunk in found.chunks])


def classifier(seed: int = 0) -> Classifier:
    model = create_model("ViT-w16d3m32h2/4", num_classes=3, image_size=8, seed=seed)
    return Classifier(Bundle(model, RULE, ("a", "b", "c"), "card", {}), "cpu")


# --- once -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_images_twice_cost_the_model_once(tmp_path: Path) -> None:
    plain, describe, opened = pictures(10_000), Counted(), []
    dataset = dataclasses.replace(plain, read=lambda i: opened.append(i) or plain.read(i))
    first = extracted(describe, dataset, tmp_path / "f", batch_size=256)
    assert (describe.images, first.computed) == (10_000, 10_000)
    second = extracted(describe, dataset, tmp_path / "f", batch_size=64)
    assert (describe.images, second.computed, len(opened)) == (10_000, 0, 10_000)
    assert torch.equal(together(first), together(second))


def test_rows_are_the_function_of_each_image_in_order(tmp_path: Path, small_chunks: None) -> None:
    dataset = pictures(37)
    found = extracted(Counted(), dataset, tmp_path / "f")
    images = torch.stack([torch.from_numpy(dataset.read(i).transpose(2, 0, 1).copy()) for i in range(37)])  # pyright: ignore
    wanted = Counted()(normalise(RULE, images))
    torch.testing.assert_close(together(found), wanted, rtol=0, atol=1e-5)
    assert [len(chunk) for chunk in found.chunks] == [8, 8, 8, 8, 5]


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (7, 0), (64, 0), (5, 2)])
def test_batches_and_workers_change_no_row(batch_size: int, workers: int, tmp_path: Path, small_chunks: None) -> None:
    one = extracted(Counted(), pictures(21), tmp_path / "one")
    other = extracted(Counted(), pictures(21), tmp_path / "other", batch_size=batch_size, workers=workers)
    torch.testing.assert_close(together(one), together(other), rtol=0, atol=1e-5)


def test_chunks_are_mapped_from_the_disk_and_writing_to_them_leaves_it_alone(tmp_path: Path) -> None:
    found = extracted(Counted(), pictures(9), tmp_path / "f")
    before = {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npy")}
    found.chunks[0][:] = 0.0
    assert {path.name: path.read_bytes() for path in (tmp_path / "f").glob("*.npy")} == before


# --- again ------------------------------------------------------------------------------------------------------------


class Cut(Exception):
    pass


def test_interruption_at_any_write_resumes_from_the_whole_chunks(tmp_path: Path, small_chunks: None) -> None:
    dataset = pictures(30)
    whole = together(extracted(Counted(), dataset, tmp_path / "whole"))
    operations: list[str] = []
    with fsio.intercept(lambda operation, _: operations.append(operation)):
        extracted(Counted(), dataset, tmp_path / "counted")
    assert len(operations) > 15
    for stop in range(len(operations)):
        folder, seen = tmp_path / f"cut{stop}", 0

        def cut(_operation: str, _path: Path, stop: int = stop) -> None:
            nonlocal seen
            seen += 1
            if seen > stop:
                raise Cut

        with pytest.raises(Cut), fsio.intercept(cut):
            extracted(Counted(), dataset, folder)
        kept = 8 * len(list(folder.glob("*.npy")))
        describe = Counted()
        found = extracted(describe, dataset, folder)
        assert torch.equal(together(found), whole)
        assert describe.images == found.computed == max(0, 30 - kept)


KILLED = """
import sys, time
from pathlib import Path
import torch
sys.path.insert(0, {here!r})
import test_features as t
from vitlab.evaluation import row_store
row_store.CHUNK_ROWS = 8
describe = t.Counted()
def slow(x):
    time.sleep(0.1)
    return describe(x)
t.extracted(slow, t.pictures(400), Path({folder!r}), batch_size=8)
"""


@pytest.mark.slow
def test_killed_process_leaves_whole_chunks_that_the_next_one_uses(tmp_path: Path, small_chunks: None) -> None:
    folder = tmp_path / "f"
    code = KILLED.format(here=str(Path(__file__).parent), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while len(list(folder.glob("*.npy"))) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = len(list(folder.glob("*.npy")))
    assert 3 <= kept < 50
    describe = Counted()
    found = extracted(describe, pictures(400), folder)
    assert describe.images == 400 - 8 * kept
    assert torch.equal(together(found), together(extracted(Counted(), pictures(400), tmp_path / "whole")))


STOPPED = Stopped(signal.SIGTERM)


def partial(folder: Path) -> list[Path]:
    return list(folder.glob("partial-*.npy"))


def stop_after(batches: int, how: BaseException = STOPPED) -> Callable[[Tensor], Tensor]:
    """A signal in the middle of the work on the next one."""
    describe, seen = Counted(), 0

    def stopped(x_BCYX: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen > batches:
            raise how
        return describe(x_BCYX)

    return stopped


@pytest.mark.parametrize("batches", range(8))
@pytest.mark.parametrize("how", [STOPPED, KeyboardInterrupt()], ids=["the command", "a script"])
def test_who_is_stopped_loses_no_batch_that_was_done(
    tmp_path: Path, small_chunks: None, batches: int, how: BaseException
) -> None:
    whole = together(extracted(Counted(), pictures(30), tmp_path / "whole", batch_size=4))
    with pytest.raises(type(how)):
        extracted(stop_after(batches, how), pictures(30), tmp_path / "f", batch_size=4)
    assert len(partial(tmp_path / "f")) == batches % 2, "half a chunk, or none"
    describe = Counted()
    found = extracted(describe, pictures(30), tmp_path / "f", batch_size=4)
    assert describe.images == found.computed == 30 - 4 * batches
    assert torch.equal(together(found), whole)
    assert not partial(tmp_path / "f")


def test_stopped_again_and_again_it_still_ends(tmp_path: Path, small_chunks: None) -> None:
    """With batches that fit into no chunk."""
    for _ in range(10):
        with pytest.raises(Stopped):
            extracted(stop_after(1), pictures(37), tmp_path / "f", batch_size=3)
    describe = Counted()
    found = extracted(describe, pictures(37), tmp_path / "f", batch_size=3)
    assert describe.images < 20
    whole = together(extracted(Counted(), pictures(37), tmp_path / "whole", batch_size=3))
    torch.testing.assert_close(together(found), whole, rtol=0, atol=1e-5)
    assert sorted(path.name[:7] for path in (tmp_path / "f").glob("*.npy")) == [f"{i:06d}-" for i in range(5)]


def test_stopped_while_a_chunk_is_written_it_is_written_all_the_same(tmp_path: Path, small_chunks: None) -> None:
    signals = [signal.SIGINT]

    def stop(operation: fsio.Operation, path: Path) -> None:
        if operation == "rename" and path.name.startswith("000001-") and signals:
            raise Stopped(signals.pop())

    with pytest.raises(Stopped), fsio.intercept(stop):
        extracted(Counted(), pictures(30), tmp_path / "f", batch_size=4)
    assert sorted(path.name[:7] for path in (tmp_path / "f").glob("*.npy")) == ["000000-", "000001-"]


def test_who_is_stopped_is_not_kept_by_a_full_disk(tmp_path: Path, small_chunks: None) -> None:
    def full(operation: fsio.Operation, path: Path) -> None:
        if operation == "write" and "partial-" in path.name:
            raise OSError(28, "No space left on device")

    with pytest.raises(Stopped), fsio.intercept(full):
        extracted(stop_after(3), pictures(30), tmp_path / "f", batch_size=4)
    assert not partial(tmp_path / "f")


def test_damaged_beginning_is_computed_again_and_the_longest_whole_one_used(tmp_path: Path, small_chunks: None) -> None:
    whole = together(extracted(Counted(), pictures(30), tmp_path / "whole", batch_size=2))
    folder = tmp_path / "f"
    with pytest.raises(Stopped):
        extracted(stop_after(1), pictures(30), folder, batch_size=2)
    (shorter,) = partial(folder)
    kept = shorter.read_bytes()
    with pytest.raises(Stopped):
        extracted(stop_after(1), pictures(30), folder, batch_size=2)
    (longer,) = set(partial(folder)) - {shorter}
    shorter.write_bytes(kept)
    (folder / f"partial-000000-{'0' * 32}.npy").write_bytes(longer.read_bytes() + b"no whole file")
    describe = Counted()
    assert torch.equal(together(extracted(describe, pictures(30), folder, batch_size=2)), whole)
    assert describe.images == 30 - 4
    assert not partial(folder)


def test_image_that_could_not_be_read_before_the_stop_is_named_after_it(tmp_path: Path, small_chunks: None) -> None:
    dataset = some_bad(12, 1, 9)
    with pytest.raises(Stopped):
        extracted(stop_after(1), dataset, tmp_path / "f", batch_size=4)
    found = extracted(Counted(), dataset, tmp_path / "f", batch_size=4)
    assert set(found.bad) == {"1.png", "9.png"}
    assert found.computed == 8


def test_damaged_chunk_is_computed_again_and_no_other(tmp_path: Path, small_chunks: None) -> None:
    whole = together(extracted(Counted(), pictures(30), tmp_path / "f"))
    hurt = sorted((tmp_path / "f").glob("*.npy"))[1]
    data = bytearray(hurt.read_bytes())
    data[-3] ^= 1
    hurt.write_bytes(data)
    describe = Counted()
    assert torch.equal(together(extracted(describe, pictures(30), tmp_path / "f")), whole)
    assert describe.images == 8
    assert len(list((tmp_path / "f").glob("*.npy"))) == 4


def test_second_process_at_the_same_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsio, "_PAUSE_S", 0.001)  # nobody lets go of it here
    fsio.make_folder(tmp_path / "f")
    with fsio.locked(tmp_path / "f"), pytest.raises(FileProblem, match="in use by another process"):
        extracted(Counted(), pictures(9), tmp_path / "f")


# --- which ------------------------------------------------------------------------------------------------------------


def kept_features(tmp_path: Path, clf: Classifier, dataset: Dataset, rule: FeatureRule) -> ImageRows:
    return features_of(clf, dataset, rule, cache=tmp_path / "cache", console=QUIET, options=InferenceOptions(workers=0))


def test_what_the_head_sees_is_the_default(tmp_path: Path) -> None:
    clf, dataset = classifier(), pictures(10)
    wanted = clf.embed([np.ascontiguousarray(dataset.read(i)) for i in range(10)])  # pyright: ignore
    torch.testing.assert_close(
        together(kept_features(tmp_path, clf, dataset, FeatureRule())), wanted, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("tokens", ["cls", "mean", "patches"])
def test_any_layer_and_token_can_be_taken(tokens: Any, tmp_path: Path) -> None:
    clf, dataset = classifier(), pictures(6)
    found = together(kept_features(tmp_path, clf, dataset, FeatureRule((0, -1), tokens)))
    images = torch.stack([torch.from_numpy(dataset.read(i).transpose(2, 0, 1).copy()) for i in range(6)])  # pyright: ignore
    with torch.inference_mode():
        reported = clf.model.features(normalise(RULE, images), tokens=tokens, layers=[0, 2])
    wanted = torch.cat([reported.layers[0].flatten(1), reported.layers[2].flatten(1)], dim=1)
    assert found.shape[1] == 2 * 16 * (4 if tokens == "patches" else 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_every_thing_that_matters_has_a_place_of_its_own(tmp_path: Path) -> None:
    clf, dataset = classifier(), pictures(6)
    kept_features(tmp_path, clf, dataset, FeatureRule())
    wider = dataclasses.replace(clf.bundle, preprocess=dataclasses.replace(RULE, mean=(0.4, 0.5, 0.5)))
    others = [
        (classifier(seed=1), dataset, FeatureRule()),
        (Classifier(wider, "cpu"), dataset, FeatureRule()),
        (clf, pictures(6, seed=1), FeatureRule()),  # the same names and labels, other pixels
        (clf, dataset.subset(torch.arange(5)), FeatureRule()),
        (clf, dataset, FeatureRule((-2,))),
        (clf, dataset, FeatureRule((-1,))),
        (clf, dataset, FeatureRule((-1,), "mean")),
    ]
    for number, other in enumerate(others, start=2):
        found = kept_features(tmp_path, *other)
        assert found.computed == len(other[1])
        assert len(list((tmp_path / "cache").iterdir())) == number
    assert kept_features(tmp_path, classifier(), pictures(6), FeatureRule()).computed == 0


def test_file_that_changed_is_another_one(tmp_path: Path) -> None:
    from PIL import Image

    from vitlab.data.sources.loose_images import open_loose

    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    before = open_loose([tmp_path]).content_fingerprint()
    assert open_loose([tmp_path]).content_fingerprint() == before
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "a.png")
    os.utime(tmp_path / "a.png", ns=(1, 1))
    assert open_loose([tmp_path]).content_fingerprint() != before


def test_unknown_token_and_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tokens"):
        FeatureRule((), "register")  # pyright: ignore
    with pytest.raises(UsageError, match="no layer 7"):
        kept_features(tmp_path, classifier(), pictures(3), FeatureRule((7,)))


# --- bad input --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Some:
    """A source of which some images are no images."""

    bad: tuple[int, ...]

    def __call__(self, i: int) -> Any:
        return b"no image" if i in self.bad else np.full((8, 8, 3), i, np.uint8)


def some_bad(count: int, *bad: int) -> Dataset:
    keys = [f"{i}.png" for i in range(count)]
    return Dataset("some", ("a", "b"), keys, single_labels(torch.arange(count) % 2), Some(bad))


def test_unreadable_image_keeps_its_place_and_is_named_in_every_run(tmp_path: Path, small_chunks: None) -> None:
    dataset = some_bad(12, 3, 9)
    for _ in range(2):
        found = extracted(Counted(), dataset, tmp_path / "f")
        assert list(found.bad) == ["3.png", "9.png"]
        assert found.readable().nonzero()[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 10, 11]
        assert together(found)[[3, 9]].isnan().all()


def test_all_bad_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match=r"none of the 3 images could be read, .*0\.png"):
        extracted(Counted(), some_bad(3, 0, 1, 2), tmp_path / "f")


def test_empty_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="some holds no images"):
        extracted(Counted(), some_bad(0), tmp_path / "f")


def test_features_that_are_not_finite_name_the_image(tmp_path: Path) -> None:
    def broken(x_BCYX: Tensor) -> Tensor:
        rows = Counted()(x_BCYX)
        rows[2] = torch.nan
        return rows

    with pytest.raises(VitlabError, match="output for arrays/2 is not finite"):
        extracted(broken, pictures(9), tmp_path / "f")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_picked_across_chunks_in_any_order() -> None:
    whole = torch.arange(60.0).reshape(20, 3)
    index = torch.tensor([19, 0, 7, 7, 12, 3])
    assert torch.equal(pick_rows(whole.split(6), index), whole[index])
    found = ImageRows(whole.split(6), {}, 0, 0.0)
    assert torch.equal(torch.cat(found.rows(index)), whole[index])
    assert found.rows(torch.arange(20)) == list(found.chunks)


class Noted(Console):
    """Keeps what stands beside the bar."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.shown: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Callable[[int, str], None]]:  # noqa: ARG002
        yield lambda done, note: self.shown.append((done, note))


def test_how_many_are_read_at_a_time_is_shown_before_the_first_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_SHOWN_EVERY_S", 0.0)  # else a fast machine shows only the last
    console = Noted()

    def describe(x_BCYX: Tensor) -> Tensor:
        assert console.shown[0] == (0, "16 at a time")
        return x_BCYX.flatten(1)

    options, store = InferenceOptions(16, 0), RowStore(tmp_path, {})
    compute_rows(RowWork(describe, RULE), pictures(40), options, store=store, world=ALONE, console=console)
    assert [done for done, _ in console.shown] == [0, 16, 32, 40]
