"""Run as a program in an empty folder: imports all of vitlab, then calls every public function twice, under watch.

With `short` those that take seconds are left out, with `long` they alone are called.

Prints one JSON document: what each call gave, and every change to this folder or look at the network together with the
vitlab module it came from. Python's audit hooks report them, so nothing can hide behind a library.
"""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitlab
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

HERE = Path.cwd()
FRACTALS = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
BODIES = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
TINY = ["pretrain.train.steps=2", FRACTALS, *BODIES, "transfer.train.steps=2"]
QUIETLY: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
LONG = ("run_study", "noisy_student", "export", "demo")  # a process of its own, a compiler, or more than one training
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}

writes: set[tuple[str, str]] = set()
network: set[str] = set()


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith("socket."):
        network.add(f"{event} {arguments!r}")
    if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
        path = arguments[0]
        if isinstance(path, str | os.PathLike) and HERE in Path(path).absolute().parents:
            writes.add((event, _nearest_vitlab_module()))


def _nearest_vitlab_module() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("vitlab."):
            return name
        frame = frame.f_back
    return "none"


def tiny_bundle() -> Path:
    model = create_model("ViT-mu/16", num_classes=2, image_size=16, seed=0)
    save_bundle(HERE / "bundle", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    return HERE / "bundle"


def two_classes() -> Path:
    """Eight small pictures of noise, the same in every call."""
    draw = np.random.default_rng(0)
    for i in range(8):
        path = HERE / "pictures" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return HERE / "pictures"


def more_pictures() -> Path:
    """Six others without labels."""
    draw = np.random.default_rng(1)
    for i in range(6):
        path = HERE / "more" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return HERE / "more"


def known_classes(pictures: Path) -> Path:
    """A table of the same pictures under the labels that the bundle knows."""
    rows = [f"{path.relative_to(HERE)},{'ab'[int(path.stem) % 2]}" for path in sorted(pictures.rglob("*.png"))]
    (HERE / "labelled.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return HERE / "labelled.csv"


def tiny_study() -> Path:
    """One cell, which measures how fast a model of one layer is; the second call finds it done."""
    stage = (
        '[scales.laptop.stages.speed]\nverb = "speed"\nset = {model = "ViT-w8d1m8h1/4", image_size = 8, batch = 1}\n'
    )
    head = 'title = "t"\nquestion = "q"\npaper = "p"\ndrawings = []\n[scales.laptop]\nabout = "a"\nseeds = [0]\n'
    (HERE / "study.toml").write_text(head + stage)
    return HERE / "study.toml"


def saved(folder: Path) -> list[str]:
    vitlab.save(create_model("ViT-mu/16", num_classes=2, seed=0), folder)
    return sorted(path.name for path in folder.iterdir())


def call_each(which: str) -> dict[str, Any]:
    bundle, pictures = tiny_bundle(), two_classes()
    labelled = known_classes(pictures)
    copy = HERE / f"copy-{len(list(HERE.iterdir()))}"
    picture = np.zeros((20, 20, 3), np.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "list_models": lambda: len(vitlab.list_models("ViT-*")),
        "list_pretrained": lambda: len(vitlab.list_pretrained("ViT-*")),
        "list_recipes": lambda: len(vitlab.list_recipes("paper-*")),
        "list_studies": lambda: len(vitlab.list_studies()),
        "report_study": lambda: len(vitlab.report_study("table2", out=copy.with_suffix(".html")).compared),
        "show_study": lambda: vitlab.show_study("positions", "gpu").to_json()["scales"]["gpu"]["cells"],
        "run_study": lambda: vitlab.run_study(str(tiny_study()), out=HERE / "studies", **QUIETLY).runs,
        "show_recipe": lambda: vitlab.show_recipe("paper-vit-b16-jft").steps,
        "plan": lambda: vitlab.plan(model="ViT-mu/16", image_size=32, steps=2, device="cpu", threads=1).images_seen,
        "model_info": lambda: vitlab.model_info("ViT-B/16", image_size=224, classes=10).params,
        "create_model": lambda: list(
            vitlab.create_model("ViT-mu/16", num_classes=3)(torch.zeros(2, 3, 224, 224)).shape
        ),
        "load": lambda: [answer.label for answer in vitlab.load(bundle, device="cpu")(picture)],
        "convert": lambda: vitlab.convert(bundle, copy).matched,
        "save": lambda: saved(copy.with_suffix(".saved")),
        "open_data": lambda: vitlab.open_data(pictures).classes,
        "check_data": lambda: vitlab.check_data(pictures, out=copy.with_suffix(".check"), workers=1, quiet=True).images,
        "list_data": lambda: len(vitlab.list_data()),
        "shard_data": lambda: vitlab.shard_data(pictures, copy.with_suffix(".shards"), workers=1, quiet=True).images,
        "split_data": lambda: vitlab.split_data(pictures, copy.with_suffix(".csv"), train=0.5, val=0, test=0.5).counts,
        "train": lambda: vitlab.train(pictures, out=copy.with_suffix(".run"), init=str(bundle), **QUIETLY).test,
        "noisy_student": lambda: (
            vitlab.noisy_student(
                pictures,
                unlabelled=more_pictures(),
                out=copy.with_suffix(".noisy"),
                model="ViT-mu/16",
                init="scratch",
                overrides=["train.steps=2", "data.image_size=32", "noisy_student.threshold=0"],
                **QUIETLY,
            ).test
        ),
        "evaluate": lambda: (
            vitlab.evaluate(bundle, labelled, out=copy.with_suffix(".evaluation"), force=True, **QUIETLY).n
        ),
        "compare": lambda: (
            vitlab.compare(bundle, bundle, labelled, force=True, out=copy.with_suffix(".compared"), **QUIETLY).n
        ),
        "export": lambda: (
            vitlab.export(
                bundle,
                copy.with_suffix(".pt2"),
                to="torch-export",
                check=pictures,
                check_images=4,
                force=True,
                threads=1,
                quiet=True,
            ).outputs
        ),
        "doctor": lambda: vitlab.doctor().healthy,
        "embed": lambda: (
            vitlab.embed(bundle, pictures, copy.with_suffix(".npz"), cache=HERE / "features", **QUIETLY).images
        ),
        "Embedder": lambda: list(vitlab.Embedder(bundle, device="cpu")({"image": picture[None]})["vector"].shape),
        "Predictor": lambda: list(vitlab.Predictor(bundle, device="cpu")({"image": picture[None]})["error"]),
        "inspect": lambda: sorted(
            vitlab.inspect(bundle, figures=["filters"], out=copy.with_suffix(".look"), **QUIETLY).figures
        ),
        "predict": lambda: [row.top[0].label for row in vitlab.predict(bundle, pictures, **QUIETLY).rows],
        "serve": lambda: vitlab.serve(bundle, dry_run=True).to_json()["models"],
        "demo": lambda: Path.as_posix(vitlab.demo(overrides=TINY, **QUIETLY).run),
        "Tape": lambda: len(vitlab.Tape("block*")),
        "VitlabError": lambda: str(vitlab.VitlabError("x")),
    }
    return {name: call() for name, call in calls.items() if (name in LONG) == (which == "long")}


def main(which: str) -> None:
    names = [module.name for module in pkgutil.walk_packages(vitlab.__path__, "vitlab.")]
    for name in names:
        importlib.import_module(name)
    sys.addaudithook(watch)
    first = call_each(which)
    (HERE / "bundle").rename(HERE / "first-bundle")
    second = call_each(which)
    ours = sorted(write for write in writes if write[1] != "none")
    print(json.dumps({"modules": names, "calls": [first, second], "writes": ours, "network": sorted(network)}))


if __name__ == "__main__":
    main(sys.argv[1])
