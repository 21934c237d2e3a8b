"""Makes the pages of the Python reference from signatures and docstrings; docs/build.py puts them under reference/api.

    python docs/api.py                      prints the pages
    python docs/api.py FOLDER               writes them to a folder

A page has public functions, and behind them the classes that they return, found by following annotations. What stands behind
a field of a class is the comment on its line.
"""

import ast
import collections
import dataclasses
import importlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch

import vitlab


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the reference: public names, and classes that no annotation leads to."""

    title: str
    about: str
    names: tuple[str, ...]
    classes: tuple[str, ...] = ()


PAGES: Mapping[str, Page] = {
    "models": Page(
        "Models",
        "Build a model from its name, count it, and look inside it.",
        ("create_model", "list_models", "list_pretrained", "model_info", "Tape"),
        ("vitlab.models.vit.ViT",),
    ),
    "classifier": Page(
        "Classifier",
        "A model with its preprocessing and its labels: load one, ask it, save it.",
        ("load", "save"),
    ),
    "data": Page(
        "Data",
        "Open images from wherever they lie; check, split and pack them.",
        ("open_data", "check_data", "split_data", "shard_data", "list_data"),
    ),
    "training": Page(
        "Training",
        "Train, and know beforehand what it takes.",
        ("train", "noisy_student", "plan", "demo", "list_recipes", "show_recipe"),
    ),
    "evaluation": Page(
        "Evaluation",
        "Labels, vectors and measures of many images, and what a model does with them inside.",
        ("predict", "embed", "evaluate", "compare", "inspect", "Embedder", "Predictor"),
    ),
    "serving": Page(
        "Serving", "A model over HTTP, and a client for it.", ("serve",), ("vitlab.serving.client.Client",)
    ),
    "conversion": Page(
        "Conversion", "Weights from and to other libraries, and files for other runtimes.", ("convert", "export")
    ),
    "studies": Page(
        "Studies and health",
        "The paper's claims run again, its tables beside our own measurements, and whether this installation is sound.",
        ("list_studies", "show_study", "run_study", "report_study", "doctor"),
    ),
    "errors": Page(
        "Errors",
        "Everything that goes wrong for a reason you can act on is a `VitlabError`.",
        ("VitlabError",),
    ),
}

# Pages for people who want more than a signature; from a page under reference/api.
_SEE = {
    "Embedder": "[Label millions of images](../../how-to/label-millions-of-images.md#as-a-stage-of-ray-data)",
    "Predictor": "[Label millions of images](../../how-to/label-millions-of-images.md#as-a-stage-of-ray-data)",
    "Tape": "[Tape](../tape.md)",
    "check_data": "[Check your data](../../how-to/check-your-data.md)",
    "compare": "[Evaluate a model](../../how-to/evaluate-a-model.md)",
    "convert": "[Convert weights](../../how-to/convert-weights.md)",
    "create_model": "[names](../names.md), [spec fields](../spec-fields.md)",
    "demo": "[Your first model](../../tutorial/first-model.md)",
    "embed": "[Predict and embed](../../how-to/predict-and-embed.md), "
    "[Label millions of images](../../how-to/label-millions-of-images.md)",
    "evaluate": "[Evaluate a model](../../how-to/evaluate-a-model.md)",
    "export": "[Export a model](../../how-to/export-a-model.md)",
    "inspect": "[Inspect a model](../../how-to/inspect-a-model.md)",
    "list_data": "[Data sets](../data-sets.md)",
    "list_pretrained": "[Use published weights](../../how-to/use-published-weights.md)",
    "list_recipes": "[Recipes](../recipes.md)",
    "list_studies": "[Published tables](../published-tables.md)",
    "load": "[Predict and embed](../../how-to/predict-and-embed.md), [Convert weights](../../how-to/convert-weights.md)",
    "noisy_student": "[Noisy Student](../../how-to/noisy-student.md), [config keys](../config-keys.md)",
    "open_data": "[Data sources](../data-sources.md)",
    "predict": "[Predict and embed](../../how-to/predict-and-embed.md), "
    "[Label millions of images](../../how-to/label-millions-of-images.md)",
    "report_study": "[Published tables](../published-tables.md)",
    "run_study": "[Run a study](../../how-to/run-a-study.md), [study files](../study-files.md)",
    "save": "[Train in your own loop](../../how-to/train-in-your-own-loop.md)",
    "serve": "[Serve a model](../../how-to/serve-a-model.md)",
    "shard_data": "[Data sources](../data-sources.md)",
    "show_recipe": "[Recipes](../recipes.md), [config keys](../config-keys.md)",
    "show_study": "[Study files](../study-files.md)",
    "split_data": "[Check your data](../../how-to/check-your-data.md)",
    "train": "[Train on your photos](../../how-to/train-on-your-photos.md), [config keys](../config-keys.md)",
}
_VERBS = {  # where the command is not called like the function
    "check_data": "data check",
    "list_data": "data list",
    "shard_data": "data shard",
    "split_data": "data split",
    "list_models": "models list",
    "model_info": "models info",
    "list_recipes": "recipes list",
    "show_recipe": "recipes show",
    "list_studies": "study list",
    "report_study": "study report",
    "run_study": "study run",
    "show_study": "study show",
    "noisy_student": "noisy-student",
    **{
        name: name
        for name in (
            "compare",
            "convert",
            "demo",
            "doctor",
            "embed",
            "evaluate",
            "export",
            "inspect",
            "plan",
            "predict",
            "serve",
            "train",
        )
    },
}
# Classes with a page of their own, written by hand: nothing behind them is followed.
_ELSEWHERE = {
    "Recipe": "../config-keys.md",
    "ModelSpec": "../spec-fields.md",
    "ViTSpec": "../spec-fields.md",
    "BiTSpec": "../spec-fields.md",
    "EfficientNetSpec": "../spec-fields.md",
    "Preprocess": "../files.md",
    "Bundle": "../files.md",
    "Model": "models.md#vit",
    "PublishedTable": "../published-tables.md",
    "Record": "../files.md",
}
_WRITTEN = ("sentences", "printed", "tables", "feature_rows")  # for the command line and report pages
_LATER = {"Figure": matplotlib.figure.Figure}  # imported by vitlab only where it is used
_INSTANCES = {"Classifier": "clf", "ViT": "model", "Dataset": "ds", "Opened": "data", "Labels": "labels"}
_MODULE_METHODS = ("represent", "features", "attention")  # of a model, beside those of every nn.Module
_IMAGE = "str | Path | bytes | Image | ndarray[Any, Any]"  # a union that would hide the rest of a signature
_ERROR_HOMES = (
    "vitlab.training.loop",
    "vitlab.core.dist",
    "vitlab.data.sources.opening",
    "vitlab.core.fsio",
    "vitlab.serving.client",
)
_ONE_LINE = 100  # characters of a signature; longer ones have a line for each parameter


def pages() -> dict[str, str]:
    """Markdown by file name."""
    return {f"{name}.md": _page(name, page) for name, page in PAGES.items()}


def _page(name: str, page: Page) -> str:
    parts = [f"# {page.title}", page.about]
    if name == "errors":
        return "\n\n".join([*parts, _errors()]) + "\n"
    for public in page.names:
        parts += _function(public) if inspect.isfunction(getattr(vitlab, public)) else _class(getattr(vitlab, public))
    for found in documented_classes(page):
        parts += _class(found)
    return "\n\n".join(parts) + "\n"


# --- functions --------------------------------------------------------------------------------------------------------


def _function(name: str) -> list[str]:
    function = getattr(vitlab, name)
    text, meanings = _split(inspect.getdoc(function) or "")
    parts = [f"## {name}", _fenced(f"vitlab.{name}", inspect.signature(function)), text]
    if meanings:
        rows = [_row(f"`{key}`", meaning) for key, meaning in meanings.items()]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    links = [f"returns {_returned(function)}"]
    if name in _VERBS:
        verb = _VERBS[name]
        links.append(f"in a shell [`vitlab {verb}`](../cli.md#vitlab-{verb.replace(' ', '-')})")
    if name in _SEE:
        links.append(f"see {_SEE[name]}")
    return [*parts, "; ".join(links).replace("returns", "Returns", 1) + "."]


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and what its `Args:` say."""
    text, _, arguments = doc.partition("\nArgs:\n")
    found: dict[str, str] = {}
    for line in textwrap.dedent(arguments).splitlines():
        if match := re.match(r"(\w+): (.*)", line):
            found[match[1]] = match[2]
        elif found:
            found[next(reversed(found))] += f" {line.strip()}"
    return text.strip(), found


def _fenced(name: str, signature: inspect.Signature) -> str:
    return f"```py\n{_written(name, signature)}\n```"


def _written(name: str, signature: inspect.Signature) -> str:
    """A call with its types: on one line, or a line for each parameter."""
    words: list[str] = []
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and "*" not in words and not any(word.startswith("*") for word in words):
            words.append("*")
        star = "*" if each.kind is each.VAR_POSITIONAL else ""
        hint = "" if each.annotation is each.empty else f": {type_name(each.annotation)}"
        default = "" if each.default is each.empty else f" = {each.default!r}" if hint else f"={each.default!r}"
        words.append(f"{star}{each.name}{hint}{default}")
    returns = signature.return_annotation
    end = "" if returns is signature.empty else f" -> {type_name(returns)}"
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= _ONE_LINE else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


def type_name(hint: Any) -> str:
    """A type as people write it: without modules, and `X | None` for what may be missing."""
    if isinstance(hint, str | list):
        return hint if isinstance(hint, str) else f"[{', '.join(map(type_name, hint))}]"
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        union = " | ".join(map(type_name, inside))
        return union.replace(_IMAGE, "Image") if _IMAGE in union else union
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_name, inside))}]"
    return {type(None): "None", Ellipsis: "..."}.get(hint) or getattr(hint, "__name__", str(hint))


def _returned(function: Any) -> str:
    """The type, with links to the classes in it."""
    hint, linked = type_name(inspect.signature(function).return_annotation), _links()
    if several := re.fullmatch(r"list\[(\w+)\]", hint):
        return f"a list of {_linked(several[1], linked)}"
    return "nothing" if hint == "None" else " or ".join(_linked(name, linked) for name in hint.split(" | "))


def _linked(name: str, linked: Mapping[str, str]) -> str:
    return f"[`{name}`]({linked[name]})" if name in linked else f"`{name}`"


# --- classes ----------------------------------------------------------------------------------------------------------


def documented_classes(page: Page) -> list[type[Any]]:
    """What the functions of a page return and the fields of that hold, but what an earlier page has."""
    return list(_classes_by_page()[page.title])


def _classes_by_page() -> dict[str, dict[type[Any], None]]:
    found: dict[str, dict[type[Any], None]] = collections.defaultdict(dict)
    seen: set[type[Any]] = {getattr(vitlab, name) for page in PAGES.values() for name in page.names if _is_class(name)}
    for page in PAGES.values():
        waiting = [_resolve(name) for name in page.classes]
        for name in page.names:
            if not _is_class(name):
                waiting += _ours(inspect.signature(getattr(vitlab, name)).return_annotation)
        while waiting:
            each = waiting.pop(0)
            if each not in seen and each.__name__ not in _ELSEWHERE:
                seen.add(each)
                found[page.title][each] = None
                waiting += [behind for hint in _hints(each).values() for behind in _ours(hint)]
    return found


def _is_class(name: str) -> bool:
    return inspect.isclass(getattr(vitlab, name))


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _ours(hint: Any) -> Iterator[type[Any]]:
    """The classes of vitlab in an annotation."""
    if inspect.isclass(hint) and hint.__module__.startswith("vitlab."):
        yield hint
    for inside in typing.get_args(hint):
        yield from _ours(inside)


def _hints(owner: type[Any]) -> dict[str, Any]:
    """Types of its fields, and what its public methods return."""
    hints = typing.get_type_hints(owner) if dataclasses.is_dataclass(owner) else {}
    fields = {name: hint for name, hint in hints.items() if not name.startswith("_")}
    for name, method in _methods(owner):
        fields[f"{name}()"] = typing.get_type_hints(method, localns=_LATER).get("return")
    return fields


def _links() -> dict[str, str]:
    here = {page.title: name for name, page in PAGES.items()}
    linked = dict(_ELSEWHERE)
    for title, classes in _classes_by_page().items():
        for found in classes:  # two pages have a Comparison; a function's own page comes first
            linked.setdefault(found.__name__, f"{here[title]}.md#{found.__name__.lower()}")
    return linked


def _class(owner: type[Any]) -> list[str]:
    parts = [f"## {owner.__name__}"]
    if dataclasses.is_dataclass(owner) or owner.__name__ == "Classifier" or not hasattr(vitlab, owner.__name__):
        parts.append(f"```py\nfrom {owner.__module__} import {owner.__name__}\n```")
    else:
        parts.append(_fenced(f"vitlab.{owner.__name__}", inspect.signature(owner)))
    parts.append(inspect.cleandoc(owner.__doc__ or ""))
    if fields := _fields(owner):
        rows = [_row(f"`{name}`", f"`{kind}`", meaning) for name, kind, meaning in fields]
        parts.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]))
    for name, method in _methods(owner):
        parts += _method(owner, name, method)
    if hasattr(vitlab, owner.__name__) and owner.__name__ in _SEE:
        parts.append(f"See {_SEE[owner.__name__]}.")
    return parts


def _fields(owner: type[Any]) -> list[tuple[str, str, str]]:
    """Name, type and comment of the fields and properties that people read."""
    if not dataclasses.is_dataclass(owner):
        return []
    meanings = comments(owner)
    hints = {field.name: field.type for field in dataclasses.fields(owner)}
    rows = [(name, type_name(hint), meanings.get(name, "")) for name, hint in hints.items() if not name.startswith("_")]
    for name, member in vars(owner).items():
        if isinstance(member, property) and not name.startswith("_"):
            hint = typing.get_type_hints(member.fget).get("return")
            rows.append((name, type_name(hint), (inspect.getdoc(member) or "").partition("\n\n")[0]))
    return rows


def comments(owner: type[Any]) -> dict[str, str]:
    """What stands behind each field of a class, on its own line or on the last of them."""
    source = textwrap.dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    fields = [each for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {
        typing.cast(ast.Name, each.target).id: by_line[line]
        for each in fields
        for line in {each.lineno, each.end_lineno}
        if line in by_line
    }


def _methods(owner: type[Any]) -> list[tuple[str, Any]]:
    """Public methods that its own docstring explains, and the call."""
    found = [(name, inspect.unwrap(member)) for name, member in vars(owner).items() if inspect.isfunction(member)]
    return [
        (name, member)
        for name, member in found
        if (not name.startswith("_") or name in ("__call__", "__getitem__")) and member.__doc__ and name not in _WRITTEN
        if name in _MODULE_METHODS or not issubclass(owner, torch.nn.Module)
    ]


def _method(owner: type[Any], name: str, method: Any) -> list[str]:
    instance = _INSTANCES.get(owner.__name__, "result")
    if name == "__getitem__":
        shown, called = f"{instance}[i]", f"{instance}.__getitem__"
    else:
        called = instance if name == "__call__" else f"{instance}.{name}"
        shown = f"{called}()"
    text, _ = _split(inspect.getdoc(method) or "")
    return [
        f"### `{shown}` {{ #{owner.__name__.lower()}-{name.strip('_')} }}",
        _fenced(called, inspect.signature(method)),
        text,
    ]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# --- errors -----------------------------------------------------------------------------------------------------------


def _errors() -> str:
    for home in _ERROR_HOMES:
        importlib.import_module(home)
    rows = [
        _row(
            f"`{kind.__name__}`",
            f"`{kind.__module__}`",
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
            " ".join((kind.__doc__ or "").split()),
        )
        for kind in _family(vitlab.VitlabError)
    ]
    text = inspect.getdoc(vitlab.VitlabError) or ""
    head = ["| class | in | is also | when |", "|---|---|---|---|"]
    return "\n\n".join(["## VitlabError", text, "\n".join([*head, *rows])])


def _family(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("vitlab."):
            yield from _family(below)


def main() -> int:
    made = pages()
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (folder / name).write_text(text, encoding="utf-8")
    else:
        print("\n".join(made.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
