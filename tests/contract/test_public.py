"""The public names: complete, documented, callable, and not shadowed by any module."""

import inspect
import json
import pkgutil
import re
import runpy
import subprocess
import sys
import typing
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest

import vitlab

ROOT = Path(__file__).parents[2]
FUNCTIONS = sorted(name for name in vitlab.__all__ if inspect.isfunction(getattr(vitlab, name)))
LONG = runpy.run_path(str(Path(__file__).with_name("call_everything.py")))["LONG"]


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.slow)])
def called(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh process saw that imported every module and then called every public name of the kind twice."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("call_everything.py")), request.param],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("called"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the list ---------------------------------------------------------------------------------------------------------


def test_all_dir_and_homes_name_the_same_things() -> None:
    assert vitlab.__all__ == sorted(vitlab.__all__)
    assert set(vitlab.__all__) == set(vitlab._HOMES)
    assert set(dir(vitlab)) == {*vitlab.__all__, "__version__"}


@pytest.mark.parametrize("name", vitlab.__all__)
def test_public_name_is_defined_where_its_home_says(name: str) -> None:
    thing = getattr(vitlab, name)
    assert thing.__module__ == vitlab._HOMES[name]
    assert thing.__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    source = (ROOT / "src" / "vitlab" / "__init__.py").read_text()
    imported = re.findall(r"^    from (\S+) import (\w+) as (\w+)$", source, re.MULTILINE)
    assert {name: module for module, name, _ in imported} == vitlab._HOMES
    assert all(name == alias for _, name, alias in imported)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = vitlab.nope


def test_promised_verbs_and_helpers_are_there() -> None:
    assert {"list_models", "create_model", "model_info", "load", "demo", "doctor"} <= set(FUNCTIONS)


def test_no_module_carries_the_name_of_a_public_function(called: dict[str, Any]) -> None:
    assert [name for name in called["modules"] if name.rsplit(".", 1)[1] in FUNCTIONS] == []


def test_import_alone_loads_no_torch() -> None:
    code = "import sys, vitlab; vitlab.list_models(); vitlab.model_info('ViT-B/16'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "name"),
    [
        pytest.param("long", name, marks=pytest.mark.slow) if name in LONG else ("short", name)
        for name in vitlab.__all__
    ],
    indirect=["called"],
)
def test_every_public_name_works_twice_after_everything_was_imported(called: dict[str, Any], name: str) -> None:
    first, second = (calls[name] for calls in called["calls"])
    assert first or name == "Tape"
    assert second == {"demo": "runs/demo-2/transfer"}.get(name, first)


def test_every_module_was_imported(called: dict[str, Any]) -> None:
    assert set(called["modules"]) == {module.name for module in pkgutil.walk_packages(vitlab.__path__, "vitlab.")}
    assert len(called["modules"]) > 40


def test_only_fsio_changes_the_disk(called: dict[str, Any]) -> None:
    assert {module for _, module in called["writes"]} == {"vitlab.core.fsio"}
    assert {event for event, _ in called["writes"]} >= {"open", "os.mkdir", "os.rename"}


def test_nothing_looks_at_the_network(called: dict[str, Any]) -> None:
    assert called["network"] == []


# --- arguments --------------------------------------------------------------------------------------------------------


def test_image_size_may_be_a_list_too() -> None:
    assert vitlab.create_model("ViT-mu/16", image_size=[32, 16]).spec.image_size == (32, 16)


@pytest.mark.parametrize(
    "arguments", [{"image_size": (224,)}, {"image_size": 224.5}, {"num_classes": 2.5}, {"seed": 2**64}], ids=str
)
def test_argument_of_the_wrong_shape_is_a_usage_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(vitlab.VitlabError):
        vitlab.create_model("ViT-mu/16", **arguments)


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_is_documented_and_annotated(name: str) -> None:
    function = getattr(vitlab, name)
    assert len((function.__doc__ or "").strip()) > 30
    hints = typing.get_type_hints(function)
    assert hints.keys() == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("owner", ["Classifier", "ViT", "BiT"])
def test_public_methods_are_documented(owner: str) -> None:
    homes = {"Classifier": "vitlab.engines.classifier", "ViT": "vitlab.models.vit", "BiT": "vitlab.models.resnet"}
    kind = getattr(pkgutil.resolve_name(homes[owner]), owner)
    methods = {name: method for name, method in vars(kind).items() if inspect.isfunction(method) and name[0] != "_"}
    undocumented = {name for name, method in methods.items() if not method.__doc__} - {"forward"}
    assert methods
    assert undocumented == set()


def test_package_says_that_it_is_typed() -> None:
    assert (resources.files("vitlab") / "py.typed").is_file()


def test_version_is_the_top_entry_of_the_changelog() -> None:
    changelog = ROOT / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("there is no CHANGELOG.md yet")
    newest = re.search(r"^## \[?v?(\d[\w.]*)", changelog.read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == vitlab.__version__ == metadata.version("vitlab")


def test_every_verb_is_a_public_function() -> None:
    from vitlab.cli.main import app

    verbs = {str(command.name).replace("-", "_") for command in app.registered_commands}
    assert verbs <= set(vitlab.__all__)
