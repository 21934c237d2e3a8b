"""A class with one photo does not stop a run, and one that was dropped is not evaluated on."""

from pathlib import Path

import torch
from PIL import Image

from vitlab.core.runtime import generator
from vitlab.data.sources.opening import open_data
from vitlab.runs.evaluation.parts import as_in_the_run
from vitlab.runs.training.training_run import train

SET = ["train.steps=2", "train.batch_size=4", "data.image_size=8", "data.workers=0", "train.method=steps"]


def photos(folder: Path) -> Path:
    for name, count in {"a": 10, "b": 10, "rare": 1}.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator(number, ord(name[0])))
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return folder


def test_class_of_one_photo_is_trained_and_the_warning_names_it(tmp_path: Path) -> None:
    data = photos(tmp_path / "photos")
    train(data, out=tmp_path / "run", model="ViT-w8d1m8h2/4", overrides=SET, threads=1, quiet=True)
    assert "rare/0.png,rare,train" in (tmp_path / "run" / "split.csv").read_text()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "trained and not tested: rare" in log
    assert "Classes with few images: 1\n" in log, "a class counts once, in however many parts it is missing"


def test_dropped_class_is_in_no_part_also_when_the_run_is_evaluated_or_resumed(tmp_path: Path) -> None:
    data, run = photos(tmp_path / "photos"), tmp_path / "run"
    overrides = [*SET, "data.min_images=2"]
    train(data, out=run, model="ViT-w8d1m8h2/4", overrides=overrides, threads=1, quiet=True)
    assert "1 of 3 classes dropped, with fewer than 2 images: rare" in (run / "log.txt").read_text()
    assert "rare" not in (run / "split.csv").read_text()
    found = as_in_the_run(run, data, open_data(data))
    assert {part: len(images) for part, images in found.parts.items()} == {"train": 14, "val": 2, "test": 4}
    assert found.classes == ("a", "b")
    before = (run / "split.csv").read_bytes()
    train(resume=run, threads=1, quiet=True)
    assert (run / "split.csv").read_bytes() == before
