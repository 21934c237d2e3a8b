"""The first ten minutes: ten newcomers type real commands, and then whatever the command prints for them to type next.

Every command is a process of its own, in an empty folder with an empty home; those of the first session are started as a shell
does it, the others forked, which saves importing torch. What a person reads is checked each time: exit
status, results on standard output alone, no traceback, no path of this machine that the person did not name.
"""

import contextlib
import csv
import functools
import http.server
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from forked_command import Command
from PIL import Image

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("VITLAB_DATA") or ROOT.parent / "shared" / "data").absolute()
WEIGHTS = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"
START = "ViT-S/14@dinov2"
PATIENCE_S = 600  # on a machine that has other work, too
PER_CLASS = 20 if os.environ.get("VITLAB_SOAK") == "1" else 8  # photos to train on, of a run with downloaded weights
QUICK = "--epochs 1 --image-size 32"  # one or two steps of a small model

if not (DATA / "hymenoptera").is_dir() or not WEIGHTS.is_file():
    pytest.skip("needs hymenoptera and dinov2_vits14 in VITLAB_DATA", allow_module_level=True)


# --- a newcomer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def next_commands(self) -> list[str]:
        """What stands under `Next:`."""
        _, _, after = self.out.partition("Next:\n")
        return [line.strip() for line in after.splitlines()]


@dataclass(frozen=True)
class Newcomer:
    """Somebody at a keyboard, in a folder."""

    folder: Path
    env: Mapping[str, str]
    with_env: Mapping[str, str] = field(default_factory=dict[str, str])

    def words(self, line: str) -> list[str]:
        """The command as a shell reads it; the two programs are those of this environment."""
        first, *rest = shlex.split(line)
        program = {"vitlab": Path(sys.executable).with_name("vitlab"), "python": Path(sys.executable)}[first]
        return [str(program), *rest]

    def start(
        self, line: str, stdout: IO[str] | int = subprocess.PIPE, stderr: IO[str] | int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(line),
            cwd=self.folder,
            env={**self.env, **self.with_env},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            encoding="utf-8",
        )

    def fork(self, line: str) -> Command:
        """The same, where nothing but the command itself is asked of its process."""

        def prepare() -> None:
            os.environ.clear()
            os.environ.update({**self.env, **self.with_env})
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.modules[
                "__main__"
            ].__package__ = None  # as that of a script: where the name of the program is looked up

        return Command(self.words(line)[1:], self.folder, prepare)

    def types(self, line: str, code: int = 0) -> Said:
        (output,) = self.types_all([line], [code])
        return output

    def types_all(self, lines: Sequence[str], codes: Sequence[int]) -> list[Said]:
        """Commands that do not need each other, at the same time."""
        commands = [self.fork(line) for line in lines]
        return [
            self.required(line, code, *command.end())
            for line, code, command in zip(lines, codes, commands, strict=True)
        ]

    def types_in_a_shell(self, *lines: str, code: int = 0) -> list[Said]:
        """Programs that are started, at the same time."""
        processes = [self.start(line) for line in lines]
        results: list[Said] = []
        for line, process in zip(lines, processes, strict=True):
            out, err = process.communicate(timeout=PATIENCE_S)
            results.append(self.required(line, code, process.returncode, out, err))
        return results

    def required(self, line: str, code: int, found: int | None, out: str, err: str) -> Said:
        assert found == code, f"{line}\n{out}\n{err}"
        return self.checked(Said(code, out, err))

    def checked(self, output: Said) -> Said:
        """What holds of whatever is printed."""
        for text in (output.out, output.err):
            assert "Traceback" not in text, text
            assert "site-packages" not in text and str(ROOT / "src") not in text, text
            assert str(self.folder) not in text, "they named it by a relative path"
            assert "\033[" not in text, "no terminal reads it"
        assert not re.search(r"^(checking|training|testing|features|step|download|vitlab:|warning:) ", output.out, re.M)
        return output


def assert_trained(output: Said, *, tested: int) -> None:
    assert re.match(rf"Test accuracy \d+\.\d% of {tested} held-out images \(95 % interval .*\)\.\n", output.out), (
        output.out
    )
    assert "checking " in output.err and "testing " in output.err
    assert len(output.next_commands) == 4


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home and a cache of their own, and no network unless a session sets it."""
    home = tmp_path_factory.mktemp("home")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VITLAB_", "XDG_", "COLUMNS"))}
    own = {"HOME": str(home), "VITLAB_CACHE": str(home / "cache"), "VITLAB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own}


@pytest.fixture
def newcomer(tmp_path: Path, env: dict[str, str]) -> Newcomer:
    return Newcomer(tmp_path, env)


def unpack(part: str, folder: Path, per_class: int) -> None:
    """Photos of ants and bees, one folder for each."""
    packed = np.load(DATA / "hymenoptera" / f"hymenoptera_{part}.npz")
    data, offsets = packed["data"].tobytes(), packed["offsets"].tolist()
    for number, name in enumerate(packed["classes"].tolist()):
        place = folder / Path(name).name
        place.mkdir(parents=True)
        for i in np.flatnonzero(packed["labels"] == number)[:per_class].tolist():
            (place / Path(str(packed["names"][i])).name).write_bytes(data[offsets[i] : offsets[i + 1]])


# --- a publisher of weights -------------------------------------------------------------------------------------------

CATALOGUE = """[[family]]
tag = "dinov2"
title = "DINOv2"
format = "dinov2"
folder = "http://127.0.0.1:{port}/"
licence = "Apache-2.0"
sources = []
spec = {{ num_classes = 0, layer_scale = 1.0, gelu = "exact", pos_resize = "bicubic-offset" }}
preprocess = {{ image_size = [224, 224], resize = "shorter-side", crop_frac = 0.875, filter = "bicubic", \
mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] }}
checkpoints = [{{ model = "ViT-S/14", file = "{file}", size = {size} }}]
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def publisher() -> Generator[int]:
    """The port of a server on this machine that has the weights."""
    handler = functools.partial(_Quiet, directory=str(WEIGHTS.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def with_publisher(one: Newcomer, port: int) -> Newcomer:
    """The same person online, where the weights are published at this port."""
    catalogue = Path(one.env["HOME"]) / f"catalogue-{port}.toml"
    catalogue.write_text(CATALOGUE.format(port=port, file=WEIGHTS.name, size=WEIGHTS.stat().st_size))
    cache = Path(one.env["HOME"]) / f"cache-{port}-{one.folder.name}"
    own = {"VITLAB_CATALOGUE": str(catalogue), "VITLAB_OFFLINE": "", "VITLAB_CACHE": str(cache)}
    return Newcomer(one.folder, one.env, own)


@dataclass(frozen=True)
class Timed:
    output: Said
    cpu_seconds: float  # of all its threads and processes, whatever else the machine did meanwhile


@pytest.fixture(scope="module")
def online(env: dict[str, str], publisher: int, tmp_path_factory: pytest.TempPathFactory) -> Generator[list[Timed]]:
    """One `vitlab train` with start weights from the network; empty until it is waited for."""
    folder = tmp_path_factory.mktemp("online")
    unpack("train", folder / "photos" / "train", PER_CLASS)
    unpack("val", folder / "photos" / "test", 2 * PER_CLASS)
    one = with_publisher(Newcomer(folder, env), publisher)
    result = list[Timed]()
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = one.start("vitlab train photos", out, err)

    def wait() -> None:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output = Said(process.returncode, (folder / "out").read_text(), (folder / "err").read_text())
        result.append(Timed(output, used.ru_utime + used.ru_stime))

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield result
    finally:
        process.kill()
        thread.join()


# --- 1 and 10: a folder of photos, twice ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def owner(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    one = Newcomer(tmp_path_factory.mktemp("owner"), env)
    unpack("train", one.folder / "photos", 14)
    return one


@pytest.fixture(scope="module")
def first_run(owner: Newcomer) -> Said:
    (output,) = owner.types_in_a_shell(f"vitlab train photos {QUICK}")
    return output


def test_folder_of_photos_is_trained_tested_and_reported(owner: Newcomer, first_run: Said) -> None:
    assert_trained(first_run, tested=6)
    assert "2 classes: 20 to train on, 2 for validation, 6 to test on\n" in first_run.err
    report = re.search(r"Report: (\S+)", first_run.out)
    assert report is not None and (owner.folder / report[1]).is_file()


def test_photo_and_the_code_under_next_work_as_printed(owner: Newcomer, first_run: Said) -> None:
    predict, _, _, python = first_run.next_commands
    photo = shlex.split(predict)[-1]
    table, printed = owner.types_in_a_shell(predict, python)
    assert table.out.startswith(f"{photo}  ") and "ants" in table.out and "bees" in table.out
    assert "Prediction(label=" in printed.out


def test_evaluation_under_next_works_once_and_overwrites_nothing(owner: Newcomer, first_run: Said) -> None:
    evaluate = first_run.next_commands[1]
    accuracy = re.search(r"Test accuracy (\d+\.\d)%", first_run.out)
    output = owner.types(evaluate)
    assert accuracy is not None and f"top-1      {accuracy[1]}" in output.out, "the same images, the same answers"
    again = owner.types(evaluate, code=2)
    assert again.out == ""
    assert "exists already, and nothing saved is overwritten\nChoose another --out" in again.err


def test_second_run_goes_to_the_next_folder(owner: Newcomer, first_run: Said) -> None:
    before = (owner.folder / "runs" / "train-1" / "report.html").read_bytes()
    output = owner.types(f"vitlab train photos {QUICK}")
    assert "Report: runs/train-2/report.html\n" in output.out
    assert (owner.folder / "runs" / "train-1" / "report.html").read_bytes() == before
    assert all("runs/train-2" in command for command in output.next_commands)


# --- 2: a table with its own names of columns -------------------------------------------------------------------------


def test_table_whose_columns_have_other_names(newcomer: Newcomer) -> None:
    unpack("train", newcomer.folder / "photos", 10)
    with (newcomer.folder / "insects.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["filename", "species", "weather"])
        for path in sorted(newcomer.folder.rglob("*.jpg")):
            rows.writerow([path.relative_to(newcomer.folder).as_posix(), path.parent.name, "sunny"])
    refused = newcomer.types(f"vitlab train insects.csv {QUICK}", code=2)
    assert refused.out == ""
    assert "insects.csv has no column 'path'; it has: filename, species, weather\n" in refused.err
    assert "--columns path=NAME,label=NAME" in refused.err
    columns = "--columns path=filename,label=species"
    output = newcomer.types(f"vitlab train insects.csv {columns}")
    assert_trained(output, tested=4)
    assert f"vitlab train insects.csv {columns} --init {START}\n" in output.err, "the data are named as before"
    newcomer.types(output.next_commands[0])


# --- 3: parts that are there already ----------------------------------------------------------------------------------


def test_folders_that_are_split_already_are_taken_as_they_are(newcomer: Newcomer) -> None:
    unpack("train", newcomer.folder / "insects" / "train", 8)
    unpack("val", newcomer.folder / "insects" / "val", 3)
    output = newcomer.types(f"vitlab train insects --dry-run {QUICK}")
    assert re.search(r"^images +2 classes: 1\d to train on, \d for validation, 6 to test on$", output.out, re.M)
    assert "val/ is the test set, since there is no test/" in output.out
    assert not (newcomer.folder / "runs").exists()
    unpack("val", newcomer.folder / "more", 7)
    for name in ("ants", "bees"):  # other photos than those of val/
        for path in sorted((newcomer.folder / "more" / name).iterdir())[-4:]:
            place = newcomer.folder / "insects" / "test" / name
            place.mkdir(parents=True, exist_ok=True)
            path.rename(place / path.name)
    output = newcomer.types(f"vitlab train insects {QUICK}")
    assert "2 classes: 16 to train on, 6 for validation, 8 to test on\n" in output.err
    assert_trained(output, tested=8)
    assert shlex.split(output.next_commands[0])[-1].startswith("insects/test/")
    newcomer.types(output.next_commands[0])


# --- 4: junk among the photos -----------------------------------------------------------------------------------------


def test_junk_among_the_photos(newcomer: Newcomer) -> None:
    photos = newcomer.folder / "Meine Fotos"
    unpack("train", photos, 10)
    (photos / "ants").rename(photos / "Käfer & Ameisen")
    first = sorted((photos / "bees").iterdir())[0]
    first.rename(first.with_name("große Biene (1).jpg"))
    (photos / "bees" / "broken.jpg").write_bytes((photos / "bees" / "große Biene (1).jpg").read_bytes()[:600])
    (photos / "bees" / "notes.txt").write_text("seen in the garden")
    (photos / ".DS_Store").write_bytes(b"\0")
    (photos / "empty class").mkdir()
    refused = newcomer.types(f"vitlab train 'Meine Fotos' {QUICK}", code=2)
    assert "Meine Fotos has no image of: empty class\n" in refused.err
    assert "--min-images 1" in refused.err
    output = newcomer.types(f"vitlab train 'Meine Fotos' --min-images 1 {QUICK}")
    assert_trained(output, tested=4)
    assert "Images that could not be read and were left out: 1; the report names them.\n" in output.out
    for line in (
        "ignored 1 file without an image extension: 1 .txt",
        "warning: 1 of 3 classes dropped, with fewer than 1 images: empty class",
        "left out: bees/broken.jpg: is not a readable image: it is damaged or cut short",
    ):
        assert line in output.err
    check = re.search(r"`(vitlab data check .*)` shows what was found", output.err)
    assert check is not None
    *_, found = newcomer.types_all([*output.next_commands[:2], check[1]], [0, 0, 1])  # 1, for what it finds is serious
    assert "bees/broken.jpg" in found.out and "They are marked !! above." in found.err


# --- 5: photos of a phone ---------------------------------------------------------------------------------------------


def test_heic_photos_are_trained_on_or_the_install_line_is_printed(newcomer: Newcomer) -> None:
    heif = pytest.importorskip("pillow_heif")
    unpack("train", newcomer.folder / "jpegs", 6)
    for path in sorted(newcomer.folder.rglob("*.jpg")):
        place = newcomer.folder / "phone" / path.parent.name / f"IMG_{path.stem}.HEIC"
        place.parent.mkdir(parents=True, exist_ok=True)
        heif.from_pillow(Image.open(path).convert("RGB").resize((96, 96))).save(place)
    hidden = newcomer.folder / "hidden"
    hidden.mkdir()
    (hidden / "pillow_heif.py").write_text("raise ImportError('hidden by a test')")
    path = os.pathsep.join([str(hidden), *filter(None, [newcomer.env.get("PYTHONPATH")])])
    without = Newcomer(newcomer.folder, newcomer.env, {"PYTHONPATH": path})
    (refused,) = without.types_in_a_shell(f"vitlab train phone {QUICK}", code=2)
    assert "phone/ants holds 6 .heic photos and no other image\n" in refused.err
    install = re.search(r"pip install 'vitlab\[(\w+)\]'", refused.err)
    assert install is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(package.startswith("pillow-heif") for package in extras[install[1]])
    output = newcomer.types(f"vitlab train phone {QUICK}")  # once it is installed
    assert_trained(output, tested=2)
    newcomer.types(output.next_commands[0])


# --- 6: a class with one photo ----------------------------------------------------------------------------------------


def test_class_with_one_photo_is_trained_and_not_tested(newcomer: Newcomer) -> None:
    unpack("train", newcomer.folder / "photos", 10)
    wasps = newcomer.folder / "photos" / "wasps"
    wasps.mkdir()
    last = sorted((newcomer.folder / "photos" / "bees").iterdir())[-1]
    last.rename(wasps / last.name)
    output = newcomer.types(f"vitlab train photos {QUICK}")
    assert "3 classes: " in output.err
    assert "warning: too few images to hold any out, so trained and not tested: wasps\n" in output.err
    check = re.search(r"`(vitlab data check .*)` shows what was found", output.err)
    assert check is not None
    checked, predicted = newcomer.types_all([check[1], output.next_commands[0]], [0, 0])
    assert "all has a single image of wasps" in checked.out
    assert "wasps" in predicted.out


# --- 7: no network ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_network_it_starts_from_the_shipped_weights_and_says_what_to_type_later(
    newcomer: Newcomer, publisher: int
) -> None:
    unpack("train", newcomer.folder / "photos", 6)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        output = with_publisher(newcomer, closed.getsockname()[1]).types("vitlab train photos")
    assert_trained(output, tested=2)
    assert "start weights: ViT-Ti/16@dinov2-distilled (11 MB, Apache-2.0" in output.err
    assert "Connection refused" in output.err and "a linear probe on features of the frozen backbone" in output.err
    later = re.search(r"once you are online: {2}(vitlab .*)$", output.err, re.M)
    assert later is not None and later[1] == f"vitlab train photos --init {START}"
    better = with_publisher(newcomer, publisher).types(later[1])
    assert_trained(better, tested=2)
    assert "a linear probe on features of the frozen backbone" in better.err
    assert "cross-validation: " in better.err


# --- 8: wrong names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "printed", "instead"),
    [
        ("vitlab trian photos", "Did you mean 'train'?\nSee `vitlab -h`.", "vitlab -h"),
        (
            "vitlab train photos --imgsz 32",
            "no such option: --imgsz. Did you mean --image-size?\nSee `vitlab train -h`.",
            "vitlab train photos --image-size 32 --dry-run",
        ),
        (
            "vitlab train photos --init vit_base_patch16_224",
            "unknown checkpoint 'vit_base_patch16_224'\nNearest: ViT-B/16@i21k-i1k-224, ",
            "vitlab train photos --init ViT-B/16@i21k-i1k-224 --dry-run",
        ),
        (
            "vitlab train photos --recipe cifar",
            "unknown recipe 'cifar'\nNearest: cifar10-mae, finetune-cifar10, transfer-cifar10. "
            "See `vitlab recipes list`",
            "vitlab recipes show cifar10-plain-vit",
        ),
        (
            "vitlab train cifar11",
            "unknown data set 'cifar11'\nNearest: cifar10, cifar100. See `vitlab data list`.",
            "vitlab data list",
        ),
        (
            "vitlab train fotos",
            "There is no folder of that name either. Did you mean the folder photos?",
            "vitlab train photos --dry-run",
        ),
    ],
)
def test_wrong_name_is_answered_with_the_right_one(owner: Newcomer, typed: str, printed: str, instead: str) -> None:
    runs = set(owner.folder.glob("runs/*"))
    refused, done = owner.types_all([typed, instead], [2, 0])
    assert refused.out == ""
    assert refused.err.startswith("vitlab: ") and printed in refused.err
    assert len(refused.err.splitlines()) == 2, "what is wrong, and what to do"
    assert done.out
    assert set(owner.folder.glob("runs/*")) == runs, "nothing was begun"


# --- 9: Ctrl-C --------------------------------------------------------------------------------------------------------


def test_interrupted_training_is_resumed_by_the_command_that_it_prints(newcomer: Newcomer) -> None:
    unpack("train", newcomer.folder / "photos", 14)
    process = newcomer.fork("vitlab train photos --epochs 12 --image-size 32")
    seen = ""
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        while not re.search(r"^training +\d", seen, re.M):
            line = process.stderr.readline()
            assert line, f"it ended before its training: {seen}"
            seen += line
        process.send_signal(signal.SIGINT)
        code, out, rest = process.end()
    stopped = newcomer.required("Ctrl-C", 130, code, out, seen + rest)
    assert stopped.out == ""
    last = re.fullmatch(
        r"vitlab: stopped\. Saved at step (\d+)\. Resume with: {2}(vitlab .*)", stopped.err.splitlines()[-1]
    )
    assert last is not None, stopped.err
    resumed = newcomer.types(last[2])
    assert f"resuming at step {last[1]} of " in resumed.err
    assert re.match(r"Test accuracy \d+\.\d% of 6 held-out images", resumed.out)
    newcomer.types(resumed.next_commands[0])


# --- and online -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_few_photos_and_downloaded_weights_give_a_good_classifier_in_minutes(online: list[Timed]) -> None:
    """Two classes, so that chance gives half."""
    deadline = time.monotonic() + PATIENCE_S
    while not online and time.monotonic() < deadline:
        time.sleep(0.2)
    (done,) = online
    output = done.output
    assert output.code == 0, output.err
    assert "Traceback" not in output.err
    assert_trained(output, tested=4 * PER_CLASS)
    assert f"Start weights: {START} (44 MB, Apache-2.0), downloaded once. Use --init scratch" in output.err
    assert output.err.count("Start weights: ") == output.err.count("start weights: ") == 1
    accuracy = re.match(r"Test accuracy (\d+\.\d)%", output.out)
    assert accuracy is not None and float(accuracy[1]) > 85
    assert done.cpu_seconds < 180, "at most three minutes, were it alone on one core"
