"""Dashboards get the numbers of metrics.jsonl, only for who asks; one that is missing is reported before any work."""

import dataclasses
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import MissingExtra
from vitlab.runs.training.live_run import best_of
from vitlab.training.recipe import Recipe
from vitlab.training.trackers import require_trackers

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads from the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_line_of_the_log_has_everything(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    folder = run(tiny(), tmp_path / "run").folder
    wanted = {"step", "loss", "lr", "grad_norm", "images_per_second", "data_wait_frac", "memory_gb", "seconds_left"}
    assert {frozenset(row) for row in rows(folder)} == {frozenset(wanted)}
    assert [row["seconds_left"] == 0 for row in rows(folder)] == [True] + [False] * 6 + [True], (
        "the first step tells no pace"
    )
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    assert (set(header.split(",")), len(lines)) == (wanted, 8)
    log = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("training")]
    for word in ("loss", "lr", "img/s", "data", "GB", "left"):
        assert all(word in line for line in log), word


def test_no_tracker_is_used_unless_asked_for(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    folder = run(tiny(), tmp_path / "run").folder
    assert not (folder / "tensorboard").exists() and not (folder / "wandb").exists()
    assert not (folder / "mlflow").exists()


def test_tensorboard_reads_the_curves_of_the_log(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    recipe = tiny('train.log=["tensorboard"]', "train.eval_every=50%")
    result = run(recipe, tmp_path / "run", parts(val=True))
    found = curves(result.folder)
    for name in ("loss", "lr", "grad_norm", "images_per_second", "data_wait_frac", "memory_gb"):
        assert found[f"train/{name}"] == pytest.approx({int(row["step"]): row[name] for row in rows(result.folder)})
    assert found["val/top1"] == pytest.approx({int(row["step"]): row["top1"] for row in result.evaluations})


def test_linear_probe_reports_its_accuracy_to_trackers(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    given = parts(val=True)
    given = dataclasses.replace(given, train=given.train.subset(torch.arange(4)))  # one of each class: no more folds
    result = run(tiny('train.log=["tensorboard"]', "train.method=probe"), tmp_path / "run", given)
    chosen = best_of(result.evaluations)["top1"]
    assert curves(result.folder)["val/top1"] == pytest.approx({0: chosen})


class Crash(BaseException):
    pass


def crash(_operation: fsio.Operation, path: Path) -> None:
    if path.name == "metrics.jsonl" and path.exists() and len(path.read_text().splitlines()) == 5:
        raise Crash


def test_line_sums_up_what_was_lately(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    """One step is slow, as after a save: the next line tells the speed of the others, and the mean of the losses."""

    def slow(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and path.exists() and len(path.read_text().splitlines()) == 5:
            time.sleep(0.5)

    console = Console(quiet=True)
    with fsio.intercept(slow):
        folder = run(tiny(), tmp_path / "run", console=console).folder
    found = rows(folder)
    slowest = min(found[1:], key=lambda row: row["images_per_second"])
    reported = [line for line in console.lines if line.startswith(f"training   {slowest['step']:.0f}/")]
    (speed,) = (float(line.partition(" img/s")[0].split()[-1]) for line in reported)
    (loss,) = (float(line.partition("loss ")[2].split()[0]) for line in reported)
    assert slowest["images_per_second"] < 0.5 * speed
    assert loss == pytest.approx(
        statistics.fmean(row["loss"] for row in found if row["step"] <= slowest["step"]), abs=1e-3
    )


def test_time_left_is_not_guessed_from_the_first_step_of_a_process(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    with pytest.raises(Crash), fsio.intercept(crash):
        run(tiny(), tmp_path / "run")
    console = Console(quiet=True)
    run(tiny(), tmp_path / "run", resume=True, console=console)
    left = [line.partition("left ")[2] for line in console.lines if line.startswith("training")]
    assert left[0] == "?"
    assert "?" not in left[1:]


def test_steps_that_a_crash_undid_are_gone_from_the_curves(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    recipe = tiny('train.log=["tensorboard"]')
    with pytest.raises(Crash), fsio.intercept(crash):
        run(recipe, tmp_path / "run")
    folder = run(recipe, tmp_path / "run", resume=True).folder
    assert curves(folder)["train/loss"] == pytest.approx({int(row["step"]): row["loss"] for row in rows(folder)})


def test_missing_extra_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(MissingExtra) as caught:
            require_trackers([name])
        assert str(caught.value).endswith(f"pip install 'vitlab[{name}]'")


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


KEY = 40 * "a"
REQUIRE = """
from vitlab.core.errors import UsageError
from vitlab.runs.training.live_run import best_of
from vitlab.training.trackers import require_trackers
try:
    require_trackers(["wandb"])
except UsageError as error:
    print(error.what)
"""


@needs_wandb
@pytest.mark.parametrize(
    ("variables", "netrc", "settings", "reported"),
    [
        ({}, "", "", "not logged in"),
        ({"WANDB_API_KEY": "short"}, "", "", "refuses its settings: WANDB_API_KEY invalid"),
        ({"WANDB_MODE": "offlin"}, "", "", "refuses its settings"),
        ({"WANDB_API_KEY": KEY}, "", "", ""),
        ({}, f"machine HOST login user password {KEY}", "", ""),
        ({"WANDB_MODE": "offline"}, "", "", ""),
        ({}, "", "[default]\nmode = offline\n", ""),
    ],
    ids=["no key", "wrong key", "wrong mode", "key in a variable", "key in .netrc", "offline", "`wandb offline`"],
)
def test_wandb_without_a_key_is_refused_before_any_work_and_prints_nothing_else(
    tmp_path: Path, variables: dict[str, str], netrc: str, settings: str, reported: str
) -> None:
    """In a process of its own: the library starts threads and a service."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text(settings)
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    with socket.create_server(("127.0.0.1", 0)) as server:  # theirs, as far as wandb knows
        server.setblocking(False)
        host = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / ".netrc").write_text(netrc.replace("HOST", host))
        env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / ".netrc"), "WANDB_BASE_URL": f"http://{host}"}
        done = subprocess.run(
            [sys.executable, "-c", REQUIRE],
            cwd=tmp_path,
            env=env | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    printed = [line for line in done.stderr.splitlines() if not line.startswith("wandb: Loading settings from")]
    assert (done.returncode, printed) == (0, [])
    assert reported in done.stdout if reported else not done.stdout


HERE = Path(__file__).parent
WANDB = """
import sys
from pathlib import Path
from vitlab.core.console import Console
sys.path[:0] = sys.argv[2:]
from conftest import make_parts, make_recipe
from vitlab.core.dist import World
from vitlab.core.runtime import prepare
from run_jobs import run_recipe
runtime = prepare("cpu", 0, 1)
recipe, parts = make_recipe('train.log=["wandb"]', "train.steps=2"), make_parts(val=True)
world, console = World(0, 1, runtime.device), Console(quiet=True)
run_recipe(recipe, parts, Path(sys.argv[1]), runtime=runtime, world=world, console=console, command="a test")
"""


@needs_wandb
def test_wandb_offline_keeps_the_run_in_its_folder_and_prints_nothing(tmp_path: Path) -> None:
    """In a process of its own: the library starts threads and a service."""
    env = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WANDB,
            str(tmp_path / "run"),
            str(Path(__file__).parent),
            str(Path(__file__).parents[2] / "system"),
        ],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (stored,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert b"train/loss" in content and b"val/top1" in content


# --- MLflow -----------------------------------------------------------------------------------------------------------


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    """What MLflow itself finds in the folder of a run."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # as who opens the folder has to
    client = mlflow.MlflowClient((folder / "mlflow").as_uri())
    return client, client.search_runs([client.get_experiment_by_name("vitlab").experiment_id])


def test_mlflow_reads_the_curves_and_the_config(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = run(tiny('train.log=["mlflow"]', "train.eval_every=50%"), tmp_path / "run", parts(val=True))
    client, (found,) = mlflow_runs(result.folder)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "Noise")
    assert found.data.params["optim.lr"] == "0.01"
    for name in ("loss", "lr", "grad_norm"):
        history = {each.step: each.value for each in client.get_metric_history(found.info.run_id, f"train/{name}")}
        assert history == pytest.approx({int(row["step"]): row[name] for row in rows(result.folder)})
    history = {each.step: each.value for each in client.get_metric_history(found.info.run_id, "val/top1")}
    assert history == pytest.approx({int(row["step"]): row["top1"] for row in result.evaluations})


def test_a_resumed_run_stays_one_run_in_mlflow(
    tmp_path: Path, tiny: Tiny, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = tiny('train.log=["mlflow"]')
    with pytest.raises(Crash), fsio.intercept(crash):
        run(recipe, tmp_path / "run")
    _, (failed,) = mlflow_runs(tmp_path / "run")
    assert failed.info.status == "FAILED"
    folder = run(recipe, tmp_path / "run", resume=True).folder
    client, (found,) = mlflow_runs(folder)
    assert (found.info.run_id, found.info.status) == (failed.info.run_id, "FINISHED")
    steps = {each.step for each in client.get_metric_history(found.info.run_id, "train/loss")}
    assert steps == {int(row["step"]) for row in rows(folder)}
