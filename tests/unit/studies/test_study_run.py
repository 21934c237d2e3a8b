"""Where the workers of a study go: every GPU and every core that there is, and what is timed has its device to itself."""

from pathlib import Path
from typing import Any

import pytest
from study_records import written_study

from vitlab.core.errors import UsageError
from vitlab.options.study_options import StudyRunOptions
from vitlab.studies import study_run
from vitlab.studies.grid import list_runs
from vitlab.studies.study_file import read_study

Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would have been started, on a machine of 16 cores with two GPUs."""
    found: Started = []

    def popen(_: Any, words: list[str], variables: dict[str, str]) -> None:
        found.append((words, variables))

    monkeypatch.setattr(study_run._Workers, "_popen", popen)
    monkeypatch.setattr(study_run, "_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(study_run, "usable_cores", lambda: 16)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def start(study: str, **options: Any) -> None:
    found = read_study(study)
    runs = list_runs([(found, found.at("gpu"))])
    study_run._Workers(Path("out"), [study], StudyRunOptions(study, scale="gpu", **options)).start(runs)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def gpus(started: Started) -> list[str]:
    assert {option(words, "--device") for words, _ in started} == {"cuda"}
    return [variables["CUDA_VISIBLE_DEVICES"] for _, variables in started]


def test_several_workers_on_each_gpu_share_the_cores(started: Started) -> None:
    start("positions")
    assert sorted(gpus(started)) == ["0"] * 4 + ["1"] * 4
    assert gpus(started)[:2] == ["0", "1"], "few runs are spread over the GPUs"
    for words, variables in started:
        assert (option(words, "--threads"), option(words, "--workers")) == ("2", "4"), "four on each GPU"
        assert variables["OMP_NUM_THREADS"] == "2"


def test_gpus_that_others_hid_are_left_alone_and_workers_can_be_chosen(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    start("positions", workers=3)
    assert gpus(started) == ["1"] * 3


def test_what_is_timed_has_its_gpu_to_itself(started: Started) -> None:
    start("attention-cost")
    assert gpus(started) == ["0", "1"]
    assert {option(words, "--workers") for words, _ in started} == {"1"}, "what the other GPU does disturbs no times"


def test_without_gpus_every_core_has_a_worker_and_no_more_workers_than_runs(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_run, "_gpus", list[str])
    start("positions")
    assert [option(words, "--device") for words, _ in started] == ["auto"] * 16
    assert {option(words, "--threads") for words, _ in started} == {"1"}
    started.clear()
    start("noisy-student", device="cpu")
    assert [option(words, "--device") for words, _ in started] == ["cpu"] * 3
    assert {option(words, "--threads") for words, _ in started} == {"1"}, "more would change what is measured"
    started.clear()
    start("attention-cost", device="cpu")
    assert [option(words, "--timed-threads") for words, _ in started] == ["16"], "what is timed has all cores"
    assert [option(words, "--threads") for words, _ in started] == ["1"], "and what is trained beside it has one"


def test_what_is_timed_has_as_many_threads_in_a_call_that_finds_one_run_left(started: Started) -> None:
    """With other threads it would be another machine, and its times would not compare with those before."""
    found = read_study("attention-cost")
    runs = list_runs([(found, found.at("gpu"))])
    for left in (runs, runs[:1]):
        study_run._Workers(Path("out"), [], StudyRunOptions("attention-cost", scale="gpu")).start(left)
    assert {option(words, "--timed-threads") for words, _ in started} == {"8"} and len(started) == 3


def test_a_failure_that_is_withdrawn_while_it_is_counted_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / study_run.FAILURES
    folder.mkdir()
    (folder / "a.txt").write_text("why")
    (folder / "b.txt").symlink_to(folder / "gone")  # listed, and no longer there when it is looked at
    assert [name for name, _ in study_run._failure_files(tmp_path)] == ["a.txt"]


def test_workers_that_die_are_started_again_but_not_without_end() -> None:
    class Dead:
        def poll(self) -> int:
            return -9

    workers = study_run._Workers(Path("out"), [], StudyRunOptions("positions"))
    again: list[list[str]] = []
    workers._popen = lambda words, _: again.append(words) or Dead()  # pyright: ignore
    workers.processes = [(Dead(), ["a"], {}), (Dead(), ["b"], {})]  # pyright: ignore
    for ended, most in ((0, 6), (0, 6), (1, 9)):
        for _ in range(8):
            workers.at_work(ended)
        assert len(again) == most


# --- what is refused before the first run -----------------------------------------------------------------------------

AXIS = "[scales.laptop.axes.kind]\nA = {}\n"
STAGE = "[scales.laptop.stages.last]\n"
UNRUNNABLE = {
    f'{STAGE}verb = "speed"\nset = {{ model = "ViT-Ti/16", image_size = 32 }}\n{AXIS}': "speed starts from no run before it",
    f'{STAGE}verb = "noisy-student"\nrecipe = "noisy-student-digits"\n{AXIS}': "noisy-student starts from no run before it",
    f'{STAGE}verb = "few-shot"\nset = {{ shots = 3 }}\n{AXIS}': "few-shot has no settings",
    f'{STAGE}verb = "inspect"\n{AXIS}B = {{ last = {{ photos = 3 }} }}\n': "B, seed 0: inspect has no settings",
    f'{STAGE}verb = "inspect"\n{AXIS}B = {{ train = {{ verb = "few-shot", init = "x" }} }}\n': "few-shot leaves no weights",
    '[scales.laptop.axes.kind]\nA = { train = { "train.stesp" = 3 } }\n': r"unknown config key 'train\.stesp'",
    '[scales.laptop.axes.kind]\nA = { train = { "model.name" = "ViT-Z/9" } }\n': "unknown model 'ViT-Z/9'",
    '[scales.laptop.axes.kind]\nA = { train = { recipe = "" } }\n': "needs a recipe, or data",
}


@pytest.mark.parametrize("text", UNRUNNABLE)
def test_what_a_worker_would_refuse_is_refused_before_the_first_run(tmp_path: Path, text: str) -> None:
    head = 'title = "t"\nquestion = "q"\npaper = "none"\ndrawings = []\n[scales.laptop]\nabout = "a"\n'
    train = '[scales.laptop.stages.train]\nrecipe = "study-laptop-vit"\n'
    path = written_study(tmp_path, head + train + text)
    with pytest.raises(UsageError, match=UNRUNNABLE[text]):
        study_run.run_study(str(path), out=tmp_path / "runs", dry_run=True, quiet=True)
    assert not (tmp_path / "runs").exists()
