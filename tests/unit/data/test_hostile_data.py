"""Faults of folders, loaders and worker processes, each with the outcome it must have, by the numbers of the fault list.

Those of single images (D1 to D11, D17) are in test_hostile_images.py, those of shards and archives (D20) beside their readers.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, VitlabError
from vitlab.data import loader
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.data.loader import BadImages, TrainInputs, eval_batches, train_batches
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.folders import open_folder
from vitlab.data.sources.opening import open_data, require_trainable
from vitlab.data.sources.shard_writing import write_shards
from vitlab.data.sources.shards import open_shards

RULE = Preprocess(image_size=(8, 8))


def pictures(root: Path, *names: str) -> Path:
    """A small picture of its own under every name."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (i % 256, i // 256, 0)).save(root / name, "PNG")
    return root


def trainable(root: Path) -> None:
    parts = open_data(root).parts
    require_trainable(*(parts.values()))


def steps(data: Dataset, bad: BadImages, count: int = 6, batch: int = 4, workers: int = 0) -> Any:
    order = Order(len(data), batch, 0)
    return train_batches(TrainInputs(data, RULE, CropRule(), order), range(count), bad=bad, workers=workers)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_d12_empty_class_one_class_and_empty_root_are_reported_before_training(tmp_path: Path) -> None:
    pictures(tmp_path / "a", "cat/1.png", "dog/1.png")
    trainable(tmp_path / "a")
    (tmp_path / "a" / "owl").mkdir()
    with pytest.raises(FileProblem, match="a has no image of: owl"):
        trainable(tmp_path / "a")
    with pytest.raises(FileProblem, match=r"one class.*: cat"):
        trainable(pictures(tmp_path / "b", "cat/1.png"))
    (tmp_path / "c").mkdir()
    with pytest.raises(FileProblem, match="holds no images in class folders"):
        trainable(tmp_path / "c")


def test_d13_classes_that_training_never_sees_are_listed(tmp_path: Path) -> None:
    root = pictures(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/2.png", "val/Dog/2.png", "val/owl/2.png")
    with pytest.raises(FileProblem, match=r"val .*train has no image of: Dog, owl"):
        trainable(root)
    notes = open_folder(root).notes
    assert notes == ("train lacks 2 of 4 classes: Dog, owl", "val lacks 1 of 4 classes: dog")


NAMES = ("-rf", "10", "9", "Cat", "cat", "z" * 255, "ü", "日本", "a b", "%s", "semi;colon", "quo'te")


def test_d14_strange_names_are_classes_like_others_in_the_same_order_everywhere(tmp_path: Path) -> None:
    root = pictures(tmp_path / "data", *(f"{name}/{name[:200]}.png" for name in NAMES))
    folder = open_folder(root).parts["all"]
    assert folder.classes == tuple(sorted(NAMES))
    bad = BadImages(0)
    (batch,) = eval_batches(folder, RULE, batch_size=len(NAMES), bad=bad)
    assert bool(batch.valid.all()) and batch.targets.tolist() == list(range(len(NAMES)))
    write_shards(open_folder(root), tmp_path / "out", per_shard=5, workers=1, advance=lambda *_: None)
    shards = open_shards(tmp_path / "out").parts["all"]
    assert (shards.classes, shards.keys) == (folder.classes, folder.keys)
    assert shards.labels.single().tolist() == folder.labels.single().tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let such names be")
def test_d14_names_that_are_not_text_are_skipped_and_counted(tmp_path: Path) -> None:
    root = pictures(tmp_path, "cat/1.png", "cat/line\nbreak.png", "new\nline/1.png", "dog/1.png")
    opened = open_folder(root)
    assert opened.classes == ("cat", "dog") and opened.parts["all"].keys == ["cat/1.png", "dog/1.png"]
    assert [note.partition(": ")[2] for note in opened.notes] == [
        "ignored 1 folder with a name that is not text; rename what you need",
        "ignored 1 file with a name that is not text; rename what you need",
    ]


def test_d14_an_accent_is_one_letter_however_a_system_spells_it(tmp_path: Path) -> None:
    composed, apart, after = "\u00e9t\u00e9", "e\u0301te\u0301", "f"
    orders = [
        open_folder(pictures(tmp_path / str(i), *(f"{name}/1.png" for name in names))).classes
        for i, names in enumerate([(composed, after), (apart, after)])
    ]
    assert orders == [(after, composed)] * 2


@pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")
def test_d15_links_in_circles_out_of_the_folder_and_to_nowhere_never_hang(tmp_path: Path) -> None:
    root = pictures(tmp_path / "data", "cat/1.png", "dog/1.png")
    outside = pictures(tmp_path / "outside", "owl/1.png", "owl/deep/2.png")
    (root / "cat" / "up").symlink_to(root, target_is_directory=True)
    (root / "self").symlink_to(root / "self")
    (root / "cat" / "self.png").symlink_to(root / "cat" / "self.png")
    (root / "cat" / "dead.png").symlink_to(root / "nowhere.png")
    (root / "owl").symlink_to(outside / "owl", target_is_directory=True)
    os.mkfifo(root / "dog" / "pipe.png")
    data = open_folder(root).parts["all"]
    assert data.classes == ("cat", "dog", "owl"), "a link to a folder outside is followed"
    assert data.keys == [*("cat/1.png", "cat/dead.png", "cat/self.png", "dog/1.png", "owl/1.png", "owl/deep/2.png")], (
        "but none back up, which would make cats of dogs"
    )
    bad = BadImages(len(data))
    list(eval_batches(data, RULE, batch_size=8, bad=bad))
    assert set(bad.found) == {"cat/dead.png", "cat/self.png"}


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_d15_a_folder_that_holds_only_itself_is_empty(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(FileProblem, match="no images in class folders"):
        open_folder(tmp_path)


# --- while the work goes on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_d16_files_deleted_changed_and_emptied_on_the_way_are_counted(tmp_path: Path, workers: int) -> None:
    names = [f"{'ab'[i % 2]}/{i}.png" for i in range(24)]
    data = open_folder(pictures(tmp_path, *names)).parts["all"]
    bad, seen = BadImages(3), 0
    for step, batch in enumerate(steps(data, bad, count=60, workers=workers)):
        if step == 2:
            (tmp_path / "a" / "4.png").unlink()
            (tmp_path / "a" / "6.png").write_bytes(b"")
            (tmp_path / "b" / "7.png").write_bytes((tmp_path / "b" / "7.png").read_bytes()[:45])
        seen += int(batch.valid.sum())
        assert batch.targets.tolist() == [int(data.labels[int(i)][0]) for i in batch.ids]
    assert set(bad.found) == {"a/4.png", "a/6.png", "b/7.png"}
    assert 60 * 4 - 60 < seen < 60 * 4
    (tmp_path / "a" / "8.png").unlink()
    with pytest.raises(VitlabError, match="4 images could not be read"):
        list(steps(data, bad, count=60, workers=workers))


class Deadly:
    """Its fourth image takes the process with it."""

    def __call__(self, i: int) -> Any:
        if i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros((9, 9, 3), np.uint8)


class Stuck:
    """Its fourth image never comes, whatever it is asked to do; the others take their time."""

    def __call__(self, i: int) -> Any:
        if i == 3:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        time.sleep(0.12)
        return np.zeros((9, 9, 3), np.uint8)


def read_by(reader: Any, count: int = 12) -> Dataset:
    plain = from_arrays(torch.zeros(count, 3, 9, 9, dtype=torch.uint8), [0] * count, ["a"])
    return Dataset("data", plain.classes, plain.keys, plain.labels, reader)


def our_children() -> set[int]:
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's own socket to the dead process
@pytest.mark.parametrize("workers", slow_after(1, [1, 2]))
def test_d18_a_worker_that_is_killed_ends_the_work_in_a_sentence(workers: int) -> None:
    before = our_children()
    for _ in range(5):  # it may die before, while or after its batch is asked for
        with pytest.raises(VitlabError, match="a process that loads images was killed"):
            list(steps(read_by(Deadly()), BadImages(0), workers=workers))
    assert our_children() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_d18_a_worker_that_hangs_is_found_and_slow_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loader._PATIENCE_S + loader._LOOK_S + 5 < 30, "what the fault list allows"
    monkeypatch.setattr(loader, "_PATIENCE_S", 2.0)  # a busy machine keeps a worker waiting for one
    monkeypatch.setattr(loader, "_LOOK_S", 0.1)
    before = our_children()
    slow = read_by(Stuck(), count=3)  # 20 images take 2.4 seconds, and none of them alone as much as 2
    assert len(list(steps(slow, BadImages(0), count=1, batch=20, workers=1))) == 1
    started = time.monotonic()
    with pytest.raises(VitlabError, match="no image was loaded in 2 seconds"):
        list(steps(read_by(Stuck()), BadImages(0), workers=2))
    assert time.monotonic() - started < 25  # what hangs does so for 600
    assert our_children() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="needs name spaces")
@pytest.mark.slow
def test_d19_too_little_shared_memory_is_named() -> None:
    code = """
        import torch
        from vitlab.core.errors import VitlabError
        from vitlab.data.dataset import from_arrays
        from vitlab.data.loader import BadImages, eval_batches
        from vitlab.data.preprocess import Preprocess

        data = from_arrays(torch.zeros(40, 3, 64, 64, dtype=torch.uint8), [0] * 40, ["a"])
        try:
            kept = list(eval_batches(data, Preprocess(image_size=(64, 64)), batch_size=10, bad=BadImages(0), workers=1))
        except VitlabError as error:
            print(error)
    """
    mounted = f"mount -t tmpfs -o size=256k tmpfs /dev/shm && exec {sys.executable} -c '{textwrap.dedent(code)}'"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted], capture_output=True, text=True, check=False, timeout=60
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("this system lets nobody make name spaces")
    assert done.stdout.startswith("the shared memory (/dev/shm)"), done.stdout + done.stderr
    assert "--shm-size" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory that is kept")
def test_d19_a_worker_without_memory_names_the_images_that_it_could_not_hold(tmp_path: Path) -> None:
    root = pictures(tmp_path, "a/small.png", "b/small.png")
    Image.new("RGB", (6000, 6000)).save(root / "a" / "large.png", compress_level=1)
    data = open_folder(root).parts["all"]
    limited = Dataset("data", data.classes, data.keys, data.labels, Limited(data.read))
    bad = BadImages(1)
    (batch,) = eval_batches(limited, RULE, batch_size=3, bad=bad, workers=1)
    assert batch.valid.tolist() == [False, True, True]
    assert bad.found == {"a/large.png": "needs more memory than is free"}


class Limited:
    """Lets its process have 60 MB more than it has; a picture of 36 million pixels needs 108."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __call__(self, i: int) -> Any:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + 60_000_000, resource.RLIM_INFINITY))
        return self.read(i)


@pytest.mark.slow
def test_two_thousand_damaged_files_do_not_stop_an_epoch_are_all_named_and_move_no_label(tmp_path: Path) -> None:
    good = pictures(tmp_path, "a/0.png").joinpath("a", "0.png").read_bytes()
    harm = [b"", b"text", good[: len(good) // 2], good[:20], bytes(200)]
    broken: set[str] = set()
    for i in range(2600):
        name = f"{'abc'[i % 3]}/{i}.png"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        damaged = i % 13 < 10
        (tmp_path / name).write_bytes(harm[i % len(harm)] if damaged else good)
        broken |= {name} if damaged else set()
    assert len(broken) == 2000
    data, bad = open_folder(tmp_path).parts["all"], BadImages(2000)
    seen: set[str] = set()
    for batch in steps(data, bad, count=26, batch=100):
        for i, label, valid in zip(batch.ids.tolist(), batch.targets.tolist(), batch.valid.tolist(), strict=True):
            seen |= {data.keys[i]}
            assert data.classes[label] == data.keys[i][0]
            assert valid == (data.keys[i] not in broken)
    assert len(seen) == 2600
    assert set(bad.found) == broken
