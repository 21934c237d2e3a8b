"""The commands under `Next:` are read by a shell as they were meant, whatever the photo is called."""

import shlex
from pathlib import Path

import pytest

from vitlab.runs.training.training_run import TrainResult
from vitlab.training.call import TrainCall


def result(photo: str, run: str = "runs/train-1") -> TrainResult:
    folder = Path(run)
    return TrainResult(folder, folder, folder, "", {}, [], [], {}, [], 1.0, 1.0, photo=photo)


@pytest.mark.parametrize(
    "photo", ["a.jpg", "große Biene (1).jpg", "it's.jpg", 'a "b".jpg', "$HOME `x`!.jpg", "a\\b.jpg"]
)
def test_commands_name_the_photo_however_it_is_called(photo: str) -> None:
    predict, evaluate, serve, python = map(shlex.split, result(photo).next_commands())
    assert predict == ["vitlab", "predict", "runs/train-1", photo]
    assert evaluate == ["vitlab", "evaluate", "runs/train-1", "--out", "runs/train-1-eval"]
    assert serve == ["vitlab", "serve", "runs/train-1"]
    assert python[:2] == ["python", "-c"]
    assert python[2] == f"import vitlab; print(vitlab.load('runs/train-1')({photo!r}))"


def test_shell_expands_nothing_in_the_code() -> None:
    assert '"' not in result("$HOME.jpg").next_commands()[-1].partition("import")[0], "it is in single quotes"
    assert result("a.jpg").next_commands()[-1].startswith('python -c "'), "which cmd.exe reads, too"


def test_photo_is_not_part_of_the_json() -> None:
    assert "photo" not in result("a.jpg").to_json()


def test_words_that_name_the_same_data_are_those_of_the_call() -> None:
    call = TrainCall("my data", columns={"path": "file name", "label": "l"}, min_images=3, seed=4, model="ViT-S/16")
    assert call.data_words() == ["my data", "--columns", "path=file name,label=l", "--min-images", "3"]
    assert TrainCall([("a.png", "a")]).data_words() == []
