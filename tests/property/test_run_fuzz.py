"""Run folders with any of their files damaged: read as they were, or reported, or refused by one error of ours."""

import functools
import hashlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import Files, Reader, damaged, hold, limits_only, odd_json
from run_jobs import run_recipe

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import VitlabError, printable
from vitlab.core.runtime import generator, prepare, restored_torch_globals
from vitlab.core.session import Session
from vitlab.data.dataset import Opened, from_arrays
from vitlab.data.parts import Parts, arrange
from vitlab.engines.classifier import load
from vitlab.evaluation.records import read_records
from vitlab.runs.evaluation.parts import as_in_the_run
from vitlab.runs.training import execute as execution
from vitlab.runs.training import finish, run_folder
from vitlab.runs.training.finish import record_runs
from vitlab.runs.training.resolve import Job
from vitlab.training.recipe import Recipe, for_other_data, recipe_from_dict

Draw = random.Random
CLASSES = ("a", "b")
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [8, 8], "mode": "L", "val_frac": 0.2},
    "model": {"name": "ViT-w8d1m8h2/4"},
    "train": {"steps": 6, "batch_size": 4, "save_every": "34 %", "eval_every": "34 %", "ema": 0.9},
    "optim": {"lr": 1e-2},
}
WORLD = World(0, 1, torch.device("cpu"))


@functools.cache
def data() -> Opened:
    images = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8, generator=generator(0))
    return Opened({"all": from_arrays(images, torch.arange(20) % 2, CLASSES, "noise")}, ())


def recipe() -> Recipe:
    return recipe_from_dict(TABLE, len(CLASSES))


def parts() -> Parts:
    return arrange(data(), recipe().data)


@functools.cache
def whole() -> Files:
    """A run of six steps that has ended, with what a sweep and several seeds keep beside it."""
    with tempfile.TemporaryDirectory() as place, restored_torch_globals():
        folder = Path(place) / "run"
        options = {"runtime": prepare("cpu", 0, 1), "world": WORLD, "console": Console(quiet=True), "command": "a test"}
        result = run_recipe(recipe(), parts(), folder, **options)
        record_runs([result], folder, recipe="", command="a test")
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files


def rehashed(files: Files, folder: str) -> Files:
    inside = {name: content for name, content in files.items() if name.startswith(f"{folder}/")}
    hashes = {Path(name).name: hashlib.sha256(content).hexdigest() for name, content in inside.items()}
    hashes.pop("manifest.json")
    return {**files, f"{folder}/manifest.json": json.dumps({"sha256": hashes}).encode()}


def odd_lines(content: bytes, draw: Draw) -> bytes:
    """A line gone, there twice, elsewhere, or with odd values."""
    lines = content.split(b"\n")
    at, to = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, lines[at])
        case 2:
            lines[at], lines[to] = lines[to], lines[at]
        case _ if lines[at].startswith(b"{"):
            lines[at] = odd_json(json.loads(lines[at]), draw)
        case _:
            lines[at] = damaged(lines[at], draw)
    return b"\n".join(lines)


def make(draw: Draw) -> Files:
    files = dict(whole())
    if draw.random() < 0.3:  # killed before its end
        files = {name: content for name, content in files.items() if not name.startswith(("bundle", "records"))}
    own = ["config.toml", "run.json", "split.csv", "metrics.jsonl", "log.txt"]
    name = draw.choice(own if draw.random() < 0.7 else [name for name in files if "/" in name])
    content = files[name]
    if name.endswith(".json") and draw.random() < 0.7:
        files[name] = odd_json(json.loads(content), draw)
    elif name in ("metrics.jsonl", "split.csv", "log.txt", "config.toml") and draw.random() < 0.5:
        files[name] = odd_lines(content, draw)
    elif draw.random() < 0.05:
        del files[name]
    else:
        files[name] = damaged(content, draw)
    inside = str(Path(name).parent)
    if (
        name in files
        and f"{inside}/manifest.json" in files
        and not name.endswith("manifest.json")
        and draw.random() < 0.8
    ):
        files = rehashed(files, inside)
    return files


def curve(records: Any) -> list[bytes]:
    return [run_folder.curve_line(record) for record in records]


@functools.cache
def whole_curve() -> list[bytes]:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "metrics.jsonl").write_bytes(whole()["metrics.jsonl"])
        return curve(run_folder.cut_metrics(Path(place), 6))


@functools.cache
def held_out_keys() -> list[str]:
    test = parts().test
    assert test is not None
    return sorted(test.keys)


def go_on(folder: Path) -> None:
    """All that `--resume` reads before its next step, in its order."""
    begun = run_folder.read_run(folder)
    found = recipe_from_dict(for_other_data(run_folder.read_config(folder)), len(CLASSES))
    job = Job(recipe=found, parts=parts(), folder=folder, command=begun.command, resume=True)
    session = Session(prepare("cpu", 0, 1), WORLD, Console(quiet=True))
    run = execution._open_run(job, session)
    with execution.open_run_dir(job, run.file, session, ()):
        execution._restore(run)
        finish._take_best(run)
        run_folder.write_notes(folder, run.file, run.records, [], every_record=False)
    assert run.state.step in (0, 2, 4, 6)
    assert (folder / "split.csv").read_bytes() == whole()["split.csv"], "not rebuilt"
    known = curve(run.records) == whole_curve()[: run.state.step]
    assert "curve" in run.file.warnings or known, "another curve, unseen"


def evaluate(folder: Path) -> None:
    """Who is tested, and by what."""
    test = as_in_the_run(folder, "noise", data()).parts["test"]
    assert sorted(test.keys) == held_out_keys(), "others are tested, unseen"
    if (folder / "bundle").exists():
        load(folder, device="cpu", quiet=True)


def tables(folder: Path) -> None:
    """What the report and later runs read."""
    if (folder / "records").exists():
        read_records(folder / "records")


def reported(read: Any) -> Any:
    def reading(folder: Path) -> None:
        try:
            read(folder)
        except VitlabError as error:
            shown = printable(str(error))
            assert all(sign == "\n" or (ord(sign) >= 32 and sign not in "\x7f\x9b\u202e") for sign in shown)
            raise

    return reading


def make_table(draw: Draw) -> Files:
    files = {name: content for name, content in whole().items() if name.startswith("records")}
    name = draw.choice(list(files))
    odd = draw.random() < 0.8
    return {**files, name: odd_json(json.loads(files[name]), draw) if odd else damaged(files[name], draw)}


READERS = [
    Reader("resume", make, reported(go_on)),
    pytest.param(Reader("evaluate", make, reported(evaluate)), marks=pytest.mark.slow),
    Reader("tables", make_table, reported(tables)),
]
COUNTS = {"resume": 50, "evaluate": 100, "tables": 150}


@limits_only
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_run_is_read_as_it_was_or_refused(reader: Reader) -> None:
    whole(), held_out_keys(), whole_curve()  # made once, before the limits
    hold(reader, COUNTS[reader.name])
