"""The promised interface: every promise names its tests, and those that nothing else tests are tested here."""

import dataclasses
import inspect
import runpy
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image

import vitlab
from vitlab.cli.main import app
from vitlab.core.errors import UnknownName
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import Classifier
from vitlab.models.names import parse_name
from vitlab.models.spec import TrunkSpec, ViTSpec
from vitlab.options.training_options import TrainOptions, short_forms
from vitlab.options.weights_options import ConvertOptions
from vitlab.weights.bundle import Bundle
from vitlab.weights.foreign import ConvertReport

ROOT = Path(__file__).parents[2]
TABLE = runpy.run_path(str(Path(__file__).with_name("interface.py")))
PROMISES = TABLE["read_promises"]()
PLANNED = sorted({one.planned for one in PROMISES if one.planned})


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_promise_has_a_test_that_exists_or_is_planned() -> None:
    assert TABLE["problems"](PROMISES) == []
    assert {one.group for one in PROMISES} == set(TABLE["GROUPS"])
    assert len({(one.group, one.promise) for one in PROMISES}) == len(PROMISES) >= 80


def test_every_promise_but_one_is_held_by_make_test() -> None:
    """`make slow` tries variations; the exception makes an environment of its own."""
    left = [one.promise for one in PROMISES if one.tests and all(map(TABLE["is_slow"], one.tests))]
    assert left == ["The wheel is installed and run in a clean environment, with the extra demo"]


def test_a_promise_without_a_test_and_a_test_that_is_gone_are_reported() -> None:
    promise, gone = TABLE["Promise"], "contract/test_interface.py::test_no_such_thing"
    wrong = [promise("Nowhere", "a", (gone,)), promise("Python", "b"), promise("Python", "c", (gone,), "verb x")]
    assert TABLE["problems"](wrong) == [
        "no such group: Nowhere",
        "neither tests nor planned, or both: b",
        "neither tests nor planned, or both: c",
        f"there is no test {gone}: a",
        f"there is no test {gone}: c",
    ]


@pytest.mark.parametrize("what", PLANNED)
def test_what_is_planned_does_not_exist_yet(what: str) -> None:
    """Once it does, the table has to name its tests."""
    kind, _, name = what.partition(" ")
    if kind == "verb":
        assert name not in VERBS and name.split()[-1] not in vitlab.__all__
    else:
        assert kind == "model"
        with pytest.raises(UnknownName):
            parse_name(name)


def test_every_verb_is_promised() -> None:
    promised = " ".join(one.promise for one in PROMISES if one.group == "Command line")
    assert [name for name in VERBS if not all(word in promised for word in name.split())] == []


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_of_the_paper_are_listed() -> None:
    vits = "ViT-Ti/16 ViT-S/32 ViT-S/16 ViT-B/32 ViT-B/16 ViT-B/8 ViT-L/32 ViT-L/16 ViT-H/14 Axial-ViT-B/16"
    others = "R50+ViT-B/16 BiT-R50x1 BiT-R50x3 BiT-R101x1 BiT-R101x3 BiT-R152x2 BiT-R152x4 EfficientNet-L2"
    assert {*vits.split(), *others.split()} <= set(vitlab.list_models())


def choices(spec: type, field: str) -> set[Any]:
    return set(typing.get_args(typing.get_type_hints(spec)[field]))


def test_spec_is_frozen_and_has_the_promised_choices() -> None:
    spec = parse_name("ViT-B/14")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_classes = 3
    assert choices(ViTSpec, "pool") >= {"cls", "gap", "map"}
    assert choices(ViTSpec, "pos") >= {"learned", "none", "learned2d", "relative", "sincos2d"}
    assert choices(ViTSpec, "pos_at") >= {"stem", "every", "shared"}
    assert choices(ViTSpec, "pos_resize") >= {"corner-bilinear", "bilinear", "bicubic", "bicubic-antialias"}
    assert choices(ViTSpec, "attention") >= {"full", "axial"}
    assert choices(ViTSpec, "head") >= {"linear", "mlp-tanh"}
    assert choices(ViTSpec, "gelu") >= {"tanh", "exact"}
    assert choices(TrunkSpec, "padding") >= {"same", "fixed"}
    fields = {field.name for kind in (ViTSpec, TrunkSpec) for field in dataclasses.fields(kind)}
    assert fields >= {
        *("patch", "image_size", "in_channels", "num_classes", "cls_in_pos", "norm_eps", "gn_eps", "ws_eps"),
        *("layer_scale", "registers", "dropout", "stochastic_depth"),
    }


# --- Python -----------------------------------------------------------------------------------------------------------


def test_created_model_is_a_module_for_any_classes_channels_and_oblong_images() -> None:
    model = vitlab.create_model("ViT-mu/16", num_classes=10, image_size=(32, 64), in_channels=4)
    assert isinstance(model, torch.nn.Module)
    assert model(torch.zeros(2, 4, 32, 64)).shape == (2, 10)


@pytest.mark.parametrize(("tokens", "shape"), [("cls", ()), ("mean", ()), ("patches", (8,))])
def test_features_of_every_kind_of_token_come_with_the_grid(tokens: Any, shape: tuple[int, ...]) -> None:
    model = vitlab.create_model("ViT-w16d2m32h2/16", image_size=(32, 64))
    found = model.features(torch.zeros(2, 3, 32, 64), tokens=tokens, layers=[0, -1])
    assert len(found.layers) == 2 and found.grid == (2, 4)
    assert {tensor.shape[:-1] for tensor in found.layers.values()} == {(2, *shape)}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve small pictures of two classes."""
    draw = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "pictures" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


TINY = ["train.steps=2", "train.batch_size=4", "data.image_size=8", "data.workers=0", "train.method=steps"]


def test_opened_data_is_trained_on(pictures: Path, tmp_path: Path) -> None:
    result = vitlab.train(
        open_data(pictures), out=tmp_path / "run", model="ViT-w8d1m8h2/4", overrides=TINY, threads=1, quiet=True
    )
    found = result.to_json()
    assert found.keys() >= {"run", "bundle", "test", "seconds", "images_per_second"}
    assert 0 <= found["test"]["top1"] <= 1 and found["test"]["n"] == 2
    assert (Path(found["bundle"]) / "model.safetensors").is_file()


def small_classifier() -> Classifier:
    model = vitlab.create_model("ViT-mu/16", num_classes=2, image_size=32, seed=0)
    return Classifier(Bundle(model, Preprocess(image_size=(32, 32)), ("a", "b"), "", {}), "cpu")


def test_opened_data_is_public_and_gives_images_with_labels(pictures: Path) -> None:
    data = vitlab.open_data(pictures)
    image, label = data[0]
    assert (image.shape, label, len(data)) == ((3, 32, 32), 0, 12)


def test_pixels_of_a_classifier_give_its_logits(pictures: Path) -> None:
    classifier, paths = small_classifier(), sorted(pictures.rglob("*.png"))[:2]
    pixels_BCYX = classifier.pixels(paths)
    with torch.no_grad():
        assert torch.equal(classifier.model(pixels_BCYX), classifier.logits(paths))


def test_model_saved_with_labels_and_preprocessing_is_loaded_with_them(tmp_path: Path) -> None:
    model, rule = small_classifier().model, Preprocess(image_size=(32, 32), filter="bicubic")
    vitlab.save(model, tmp_path / "out", labels=("cat", "dog"), preprocess=rule)
    again = vitlab.load(tmp_path / "out", device="cpu")
    assert (again.labels, again.preprocess) == (("cat", "dog"), rule)


# --- command line -----------------------------------------------------------------------------------------------------


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb by the words that call it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, inner in command.commands.items():
        yield from commands(inner, f"{name} {word}".strip())


WHOLE: Any = typer.main.get_command(app)
VERBS: dict[str, Any] = dict(commands(WHOLE))
FUNCTION = {  # of verbs that consist of two words
    "data check": "check_data",
    "data list": "list_data",
    "data shard": "shard_data",
    "data split": "split_data",
    "models info": "model_info",
    "models list": "list_models",
    "noisy-student": "noisy_student",
    "recipes list": "list_recipes",
    "recipes show": "show_recipe",
    "study list": "list_studies",
    "study report": "report_study",
    "study run": "run_study",
    "study show": "show_study",
}
ON_THE_COMMAND_LINE_ALONE = {"as_json", "debug", "print_config", "pretrained"}
COMPUTING = ("demo", "train", "noisy-student", "predict", "evaluate", "compare", "embed", "plan")
WRITING = (
    "demo",
    "train",
    "noisy-student",
    "predict",
    "evaluate",
    "compare",
    "embed",
    "convert",
    "data check",
    "data split",
    "data shard",
    "study run",
    "study report",
)


@pytest.mark.parametrize("name", VERBS)
def test_verb_and_function_have_the_same_options(name: str) -> None:
    function = inspect.signature(getattr(vitlab, FUNCTION.get(name, name)))
    options = {parameter.name for parameter in VERBS[name].params} - ON_THE_COMMAND_LINE_ALONE
    assert options == set(function.parameters)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_the_options_of_all(name: str) -> None:
    command = VERBS[name]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {"--json", "--debug"} <= flags
    whole = WHOLE.make_context("vitlab", [name.split()[0]], resilient_parsing=True)
    context = command.make_context(name, [], parent=whole, resilient_parsing=True)
    assert set(command.get_help_option_names(context)) == {"-h", "--help"}
    if name in COMPUTING:
        assert {"--device", "--seed", "--threads", "--quiet"} <= flags
    if name in WRITING:
        assert "out" in {parameter.name for parameter in command.params}


def test_version_of_any_verb_is_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vitlab", "train", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"vitlab {vitlab.__version__}\n"


def test_short_forms_set_the_promised_keys() -> None:
    given = short_forms(TrainOptions("photos", epochs=2, lr=0.1, batch_size=8, image_size=(32, 64)))
    assert set(given) == {"train.epochs=2", "optim.lr=0.1", "train.batch_size=8", "data.image_size=[32, 64]"}


COMMON_KEYS = (
    *("data.image_size=32", "data.workers=0", "train.epochs=2", "train.steps=3", "train.examples=12"),
    *("train.batch_size=4", "optim.lr=0.1", "optim.weight_decay=0.2", "model.pool=gap"),
)


@pytest.mark.parametrize("key", COMMON_KEYS)
def test_common_config_keys_exist(key: str, pictures: Path) -> None:
    """A key that no recipe has is refused, even in a dry run."""
    vitlab.train(pictures, init="scratch", overrides=[key], dry_run=True, quiet=True)
    with pytest.raises(vitlab.VitlabError, match="unknown config key"):
        vitlab.train(pictures, init="scratch", overrides=[key.replace("=", "_=", 1)], dry_run=True, quiet=True)


def test_promised_data_sets_have_names() -> None:
    names = {row.name.replace("-", "_") for row in vitlab.list_data()}
    assert {"cifar10", "cifar100", "oxford_pets", "flowers102", "tiny_imagenet", "imagenet", "fractals"} <= names


def test_convert_knows_the_promised_formats() -> None:
    known = typing.get_args(typing.get_type_hints(ConvertOptions)["to"])
    assert {"vitlab", "google-npz", "big-vision", "timm", "hf", "torchvision"} <= set(known)


def test_convert_reports_the_promised_keys() -> None:
    keys = {field.name for field in dataclasses.fields(ConvertReport)}
    assert keys >= {"matched", "missing", "unexpected", "reshaped", "out"}


# --- set-up -----------------------------------------------------------------------------------------------------------


def test_make_builds_the_environment_for_demo_and_test() -> None:
    """What make would do in a folder without an environment: print it, and do nothing."""
    for target, ends_with in (("demo", "vitlab demo"), ("test", "tests/oracle")):
        done = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", target, "V=.no-venv", "O=.no-venv-oracle"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        lines = done.stdout.splitlines()
        assert any("-m venv .no-venv" in line for line in lines) and any("pip install" in line for line in lines)
        assert lines[-1].endswith(ends_with)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"


def test_core_dependencies_are_few_and_extras_optional() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    assert {"torch", "numpy", "pillow", "safetensors"} <= core and len(core) <= 8
    assert {"demo", "tensorboard", "wandb"} <= set(project["optional-dependencies"])
    assert "scikit-learn" in project["optional-dependencies"]["demo"][0]


SPAWNED = """
import multiprocessing, sys
import vitlab

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    set_up = dict(model="ViT-w8d1m8h2/4", threads=1, quiet=True, out="run")
    steps = ["train.steps=1", "train.batch_size=4", "data.image_size=8", "data.workers=1", "train.method=steps"]
    print(vitlab.train("pictures", overrides=steps, **set_up).test["n"])
"""


@pytest.mark.slow  # a process that starts others, each with torch; test_main_guard.py predicts in spawned ones
def test_loader_works_in_spawned_processes(pictures: Path) -> None:
    script = pictures.parent / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
