"""The Python reference is made from the code: every public name is on it, and everything on it is explained."""

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vitlab
from vitlab.core.errors import VitlabError

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = [
    "Audit",
    "AttentionMaps",
    "Checkup",
    "Classifier",
    "Comparison",
    "ConvertReport",
    "Dataset",
    "DemoResult",
    "Embedding",
    "EvaluationResult",
    "Explanation",
    "Features",
    "InspectResult",
    "ModelInfo",
    "Opened",
    "Prediction",
    "Predictions",
    "RunPlan",
    "ShownRecipe",
    "Split",
    "StudyReport",
    "TrainResult",
    "ViT",
]


def _load_api() -> Any:
    """docs/api.py is a script, not a part of a package."""
    spec = importlib.util.spec_from_file_location("docs_api", DOCS / "api.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


api = _load_api()
FUNCTIONS = [name for name in vitlab.__all__ if inspect.isfunction(getattr(vitlab, name))]


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """What stands under each level-two heading of the pages."""
    found: dict[str, str] = {}
    for text in api.pages().values():
        parts = re.split(r"(?m)^## (.+)$", text)
        found |= {name: body for name, body in zip(parts[1::2], parts[2::2], strict=True) if name not in found}
    return found


def test_every_public_name_is_on_one_page() -> None:
    named = [name for page in api.PAGES.values() for name in page.names]
    assert sorted(named) == sorted(vitlab.__all__)
    start = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    for key, page in api.PAGES.items():
        assert all(f"(api/{key}.md#{name.lower()})" in start for name in page.names)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_shown_and_explained(name: str, sections: dict[str, str]) -> None:
    signature = inspect.signature(getattr(vitlab, name))
    shown = re.search(r"```py\n(.*?)```", sections[name], re.DOTALL)
    assert shown
    for parameter in signature.parameters.values():
        assert re.search(rf"\b{parameter.name}: ", shown[1]), parameter.name
        assert re.search(rf"(?m)^\| `{parameter.name}` \| \S", sections[name]), f"{name}: Args lack {parameter.name}"


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_section(name: str, sections: dict[str, str]) -> None:
    assert name in sections


def test_every_field_of_a_result_is_listed_and_every_class_explained(sections: dict[str, str]) -> None:
    classes = [found for page in api.PAGES.values() for found in api.documented_classes(page)]
    assert len(classes) > len(RESULTS)
    for found in classes:
        assert found.__doc__ and not found.__doc__.startswith(f"{found.__name__}("), (
            f"{found.__name__} has no docstring"
        )
        if dataclasses.is_dataclass(found) and found.__module__ in sections[found.__name__]:
            missing = [f.name for f in dataclasses.fields(found) if f"| `{f.name}` |" not in sections[found.__name__]]
            assert not missing, f"{found.__name__}: {missing}"


def test_methods_of_the_classifier_are_listed(sections: dict[str, str]) -> None:
    assert all(f"`clf.{name}()`" in sections["Classifier"] for name in ("embed", "explain", "logits", "pixels", "save"))


def test_every_error_is_listed(sections: dict[str, str]) -> None:
    for module in pkgutil.walk_packages(vitlab.__path__, "vitlab."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    listed = set(re.findall(r"(?m)^\| `(\w+)` \|", sections["VitlabError"]))
    assert listed == {kind.__name__ for kind in _family(VitlabError)}


def _family(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("vitlab."):
            yield from _family(below)


def test_types_are_written_as_people_write_them() -> None:
    assert api.type_name(dict[str, tuple[int, ...]] | None) == "dict[str, tuple[int, ...]] | None"
    assert api.type_name(Path | str) == "Path | str"
    assert api.type_name(list[VitlabError]) == "list[VitlabError]"


def test_comments_behind_fields_are_their_meaning() -> None:
    from vitlab.models.facts import ModelInfo

    assert api.comments(ModelInfo)["stride"] == "pixels from one patch to the next"
    assert "name" not in api.comments(ModelInfo)
