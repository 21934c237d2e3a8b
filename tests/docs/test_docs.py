"""The documentation does what it says: every page runs, every link leads somewhere, and no table falls behind the code."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import vitlab
from vitlab.cli.main import app
from vitlab.data.augmentation.augment import AugmentRule
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.augmentation.mixing import MixRule
from vitlab.engines.classifier import Classifier
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.spec import AxialResNetSpec, BiTSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.models.vit import ViT
from vitlab.runs.training.training_run import TrainResult
from vitlab.studies import study, study_file
from vitlab.studies.cell_run import execute_run
from vitlab.studies.grid import StudyRun
from vitlab.studies.inspected import heads_measure
from vitlab.studies.units import MEASURES, is_share
from vitlab.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BY_A_BROWSER = {
    "report",
    "attention",
    "serve-page",
    "serve-page-empty",
    "serve-page-dark",
    "serve-page-phone",
}  # pictures that tests/browser makes, not a page of the documentation
# Of `vitlab inspect` with DINOv2 and eight pets, which takes too long for a page; how-to/inspect-a-model.md has the command.
OF_AN_INSPECTION = {f"inspect-{name}" for name in ("viewer", "viewer-phone", "saliency", "norms", "features")}


def _load(script: str) -> Any:
    """docs/execute.py and docs/api.py are scripts, not parts of a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{script}", DOCS / f"{script}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


execute, api = _load("execute"), _load("api")
PAGES = execute.all_pages()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
# They train, or export, for longer than a page of `make test` may: `make slow` runs them, and `make docs`.
LONG_PAGES = {
    *("explanation/from-attention-to-vit.md", "explanation/optimisers.md", "how-to/noisy-student.md"),
    *("how-to/pretrain-without-data.md", "how-to/pretrain-without-labels.md"),
    *("how-to/export-a-model.md", "how-to/see-attention.md", "reference/study-files.md"),
    "tutorial/photos-to-attention.md",
}


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Pages set torch up as a reader would; what follows must not notice."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_grad_enabled(True)


def _read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _prose(page: Path) -> str:
    """The page without its fenced blocks."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in reversed(execute.find_blocks(lines)):
        del lines[block.start - 1 : block.stop + 1]
    return "\n".join(lines)


def _section(text: str, heading: str) -> str:
    """What stands under a level-two heading."""
    parts = re.split(r"(?m)^## (.+)$", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def _rows(text: str) -> list[list[str]]:
    """The cells of all table rows, heads left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rule = [i for i, line in enumerate(lines) if set(line) <= set("|-")]
    heads = {number for i in rule for number in (i - 1, i)}
    return [[cell.strip() for cell in line.strip("|").split("|")] for i, line in enumerate(lines) if i not in heads]


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in map(DOCS.joinpath, LONG_PAGES) else page for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
@pytest.mark.usefixtures("_one_thread")
def test_page_does_what_it_says(page: Path) -> None:
    if absent := execute.missing(page):
        pytest.skip(f"{absent[0]} is not here")
    problems = execute.execute(page)
    assert not problems, "\n\n".join([*problems, "To accept what really comes out: make docs"])


def test_long_pages_exist() -> None:
    assert {DOCS / name for name in LONG_PAGES} <= set(PAGES)


@each_page
def test_fences_are_of_a_known_kind(page: Path) -> None:
    """A slip of the pen after the backticks would turn a block into one that nobody runs."""
    known = {"python", "python no-run", "console", "console no-run", "text", "py", "toml", "json", "bash", ""}
    lines = page.read_text(encoding="utf-8").splitlines()
    assert {block.kind for block in execute.find_blocks(lines)} <= known


@each_page
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", _prose(page))
    broken = [
        target
        for target in targets
        if not re.match(r"https?://|mailto:|#", target) and not _is_there(page.parent / target.partition("#")[0])
    ]
    assert not broken


def _is_there(path: Path) -> bool:
    """Also of the pages that are made when the site is built."""
    generated = path.resolve().parent == DOCS / "reference" / "api" and path.stem in api.PAGES
    return generated or path.exists()


def test_pictures_are_made_shown_and_small() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    made = {name for text in texts for name in re.findall(r'(?m)^ *picture\(.+, "([\w-]+)"\)$', text)}
    shown = {name for text in texts for name in re.findall(r"""[("][\w./]*pictures/([\w-]+)\.png[)"]""", text)}
    kept = {path.stem for path in (DOCS / "pictures").iterdir()}
    by_hand = BY_A_BROWSER | OF_AN_INSPECTION
    assert made | by_hand == shown == kept
    most = {path: 140_000 if path.stem in by_hand else 60_000 for path in (DOCS / "pictures").iterdir()}
    assert all(path.stat().st_size <= limit for path, limit in most.items())


# --- names in the text ------------------------------------------------------------------------------------------------


@each_page
def test_dotted_names_exist(page: Path) -> None:
    for name in re.findall(r"`(vitlab(?:\.\w+)+)`", _prose(page)):
        _resolve(name)


@each_page
def test_named_files_and_tests_exist(page: Path) -> None:
    rooms = "|".join(path.name for path in (ROOT / "src" / "vitlab").iterdir() if path.is_dir())
    prose = _prose(page)
    for path in re.findall(rf"`((?:{rooms})/\w+\.py)`", prose):
        assert (ROOT / "src" / "vitlab" / path).exists(), path
    for path in re.findall(r"`((?:docs|bench)/[\w./-]+)`", prose):
        assert (ROOT / path).exists(), path
    for path, name in re.findall(r"`(tests/[\w./-]+?)(?:::(\w+))?`", prose):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


COMING_FROM = sorted((DOCS / "how-to").glob("coming-from-*.md"))


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_what_to_type_instead_can_be_typed(page: Path) -> None:
    """Of the last column: verbs with their options, functions with their arguments, methods, config keys and names."""
    spans = [span for row in _rows(page.read_text(encoding="utf-8")) for span in re.findall(r"`([^`]+)`", row[-1])]
    keys = {key for key, _, _ in _leaves(Recipe)}
    counted = 0
    for span in spans:
        if "vitlab " in span:
            words = shlex.split(span.partition("vitlab ")[2])
            command: Any = typer.main.get_command(app)
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            flags = {flag for option in command.params for flag in option.opts}
            assert {word for word in words if word.startswith("--")} <= flags, span
            settings = {
                words[i + 1].partition("=")[0] for i, word in enumerate(words[:-1]) if word in ("--set", "--sweep")
            }
            assert settings <= keys, span
            named = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--init"]
            assert set(named) <= set(vitlab.list_pretrained()), span
            counted += 1
        for call in (node for node in _parsed(span) if isinstance(node, ast.Call)):
            _require_call(call, span)
            counted += 1
    assert counted > 10


def _parsed(span: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse(span))
    except SyntaxError:  # a line for a shell, or a word
        return


OWNERS: dict[str, Any] = {"vitlab": vitlab, "clf": Classifier, "model": ViT, "run": TrainResult}


def _require_call(call: ast.Call, span: str) -> None:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        called = getattr(OWNERS[function.value.id], function.attr)
        assert {keyword.arg for keyword in call.keywords} <= set(inspect.signature(called).parameters), span
        texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        assert {text for text in texts if "@" in text} <= set(vitlab.list_pretrained()), span
        if function.attr == "create_model":
            vitlab.model_info(texts[0])


def _resolve(name: str) -> Any:
    """The object behind a dotted name: modules as far as they go, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


# --- reference pages against the code ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [ViTSpec, TrunkSpec, BiTSpec, EfficientNetSpec, AxialResNetSpec],
    ids=lambda schema: schema.__name__,
)
def test_spec_fields_are_listed_with_their_defaults_and_choices(schema: type[Any]) -> None:
    rows = _rows(_section(_read("reference/spec-fields.md"), schema.__name__))
    fields = dataclasses.fields(schema)
    assert [(row[0], row[1]) for row in rows] == [(f"`{field.name}`", _default(field, "")) for field in fields]
    hints = typing.get_type_hints(schema)
    for row, field in zip(rows, fields, strict=True):
        if typing.get_origin(hints[field.name]) is typing.Literal:
            assert all(f"`{choice}`" in row[2] for choice in typing.get_args(hints[field.name])), field.name


def test_bit_column_of_the_trunk_is_what_a_bit_name_sets() -> None:
    bit = bit_trunk((1,), 1)
    for name, default, _, in_bit in _rows(_section(_read("reference/spec-fields.md"), "TrunkSpec")):
        if default:
            assert (in_bit or default) == f"`{getattr(bit, name.strip('`'))!r}`"


def test_spec_properties_are_listed() -> None:
    properties = [name for name, member in vars(ViTSpec).items() if isinstance(member, property)]
    assert all(f"`{name}`" in _section(_read("reference/spec-fields.md"), "ViTSpec") for name in properties)


@pytest.mark.parametrize(
    ("heading", "rule"),
    [("Crops for training", CropRule), ("Augmentation", AugmentRule), ("MixUp and CutMix", MixRule)],
)
def test_rules_for_training_images_are_listed_with_their_defaults(heading: str, rule: type[Any]) -> None:
    listed: dict[str, str] = {}
    for names, defaults, _ in _rows(_section(_read("reference/decoding.md"), heading)):
        fields, values = re.findall("`(.+?)`", names), re.findall("`(.+?)`", defaults)
        listed |= dict(zip(fields, values if len(values) > 1 else values * len(fields), strict=True))
    assert listed == {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(rule)}


def test_config_keys_are_listed_with_their_defaults_and_choices() -> None:
    rows = _rows(_read("reference/config-keys.md"))
    leaves = list(_leaves(Recipe))
    assert [(row[0], row[2]) for row in rows] == [(f"`{key}`", _default(field, "needed")) for key, field, _ in leaves]
    for row, (key, _, hint) in zip(rows, leaves, strict=True):
        if typing.get_origin(hint) is typing.Literal:
            assert all(f"`{choice}`" in row[1] for choice in typing.get_args(hint)), key


STUDY_TABLES = {
    "The study": study_file._StudyTable,
    "Scales": study_file._ScaleTable,
    "Stages": study.Stage,
    "Drawings": study.Drawing,
    "Claims": study.Claim,
    "Tests": study.Test,
    "Printed": study.Printed,
}


@pytest.mark.parametrize("heading", STUDY_TABLES)
def test_keys_of_a_study_are_listed_with_their_defaults_and_choices(heading: str) -> None:
    section, schema = _section(_read("reference/study-files.md"), heading), STUDY_TABLES[heading]
    rows = [row for row in _rows(section) if len(row) == 4]
    fields, hints = dataclasses.fields(schema), typing.get_type_hints(schema)
    assert [(row[0], row[2]) for row in rows] == [(f"`{field.name}`", _default(field, "needed")) for field in fields]
    for row, field in zip(rows, fields, strict=True):
        if field.name != "statistic":  # it has a table of its own
            assert all(f"`{choice}`" in row[1] for choice in _choices(hints[field.name])), field.name


def _choices(hint: Any) -> tuple[Any, ...]:
    """Of a closed set, or of a tuple of such."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def test_keys_of_an_axis_value_its_labels_and_statistics_are_listed() -> None:
    page = _read("reference/study-files.md")
    value = {row[0].strip("`"): row[3] for row in _rows(_section(page, "Axis values"))}
    assert list(value) == [*study_file._VALUE_KEYS, "STAGE"]
    assert all(f"`{key}`" in value["STAGE"] for key in study.STAGE_KEYS)
    labels = [row[0] for row in _rows(_section(page, "Tests")) if len(row) == 2]
    assert labels == [f"`{label}`" for label in (*study.ENDS, study.BEST)]
    listed = [row[0] for row in _rows(_section(page, "Statistics"))]
    assert listed == [f"`{name}`" for name in typing.get_args(study.Statistic)]
    (drawn_over,) = (row[3] for row in _rows(_section(page, "Drawings")) if row[0] == "`x`")
    assert all(f"`{name}`" in drawn_over for name in study.NO_AXES)


TINY = {"model.name": "ViT-w8d2m8h2/4", "data.image_size": [8, 8], "train.batch_size": 8, "train.steps": 2}
TINY_STAGES = {  # in this order: what is measured is the first
    "train": study.Stage(recipe="study-laptop-vit", set=TINY),
    "train, no labels": study.Stage(recipe="study-laptop-vit", set={**TINY, "objective.kind": "masked-patches"}),
    "noisy-student": study.Stage(
        verb="noisy-student", recipe="noisy-student-digits", set={**TINY, "noisy_student.threshold": 0.0}
    ),
    "few-shot": study.Stage(verb="few-shot"),
    "inspect": study.Stage(verb="inspect", set={"max_images": 4}),
    "speed": study.Stage(verb="speed", set={"model": "ViT-w8d1m8h1/4", "image_size": 8, "batch": 1}),
}
# Of images with several labels, and of a GPU.
NOT_OF_DIGITS = {"mean_ap", "teacher_mean_ap", "largest_batch"}
MADE_WHEN_READ = {"distance_growth", "second_half_wide_heads"}  # of the other numbers of a record


@pytest.mark.usefixtures("_one_thread")
def test_measures_of_each_verb_are_those_that_a_run_writes(tmp_path: Path) -> None:
    listed: dict[str, set[str]] = {}
    section = _section(_read("reference/study-files.md"), "Measures")
    for verb, measures, _ in _rows(section):
        listed.setdefault(verb.strip("`"), set()).update(re.findall("`(.+?)`", measures))
    everywhere = listed.pop("any") - {"flops", "seconds", "macs_per_second"}  # which come of several stages or numbers
    assert tuple(listed) == typing.get_args(study.StageVerb)
    assert {verb: set(names) for verb, names in MEASURES.items()} == listed, "what a study file may name"
    written: dict[str, set[str]] = {}
    for name, stage in TINY_STAGES.items():
        start = tmp_path / "train" if stage.verb in ("few-shot", "inspect") else None
        numbers = execute_run(StudyRun(name, stage, 0, None), tmp_path / name, start, device="cpu", threads=1).numbers
        if stage.verb == "noisy-student":
            assert numbers["margin"] == pytest.approx(numbers["top1"] - numbers["teacher_top1"])
        made = {name for name in MADE_WHEN_READ if heads_measure(numbers, name) is not None}
        assert made == (MADE_WHEN_READ if stage.verb == "inspect" else set())
        written.setdefault(stage.verb, set()).update(numbers, made)
    for verb, names in written.items():
        heads = {name for name in names if re.fullmatch(r"distance_layer\d+_head\d+", name)} - {"distance_layer1_head1"}
        assert names - heads == (listed[verb] - NOT_OF_DIGITS) | everywhere, verb
    shares = {name for name in set().union(*listed.values()) if is_share(name) and not name.startswith("teacher_")}
    assert all(f"`{name}`" in section.rpartition("|")[2] for name in shares), "what reports print in per cent"


def _leaves(schema: type[Any], where: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(dotted key, field, type) of every leaf; the model is one leaf here, because its fields have a page of their own."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        nested = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        if nested and field.name != "model":
            yield from _leaves(typing.cast(type[Any], nested[0]), f"{where}{field.name}.")
        else:
            yield where + field.name, field, hint


def _default(field: dataclasses.Field[Any], missing: str) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return missing if field.default is dataclasses.MISSING else f"`{field.default!r}`"


def test_every_command_is_shown_with_its_help() -> None:
    page = _read("reference/cli.md")
    for words in _commands(typer.main.get_command(app), ["vitlab"]):
        assert f"\n## {' '.join(words)}\n" in page
        assert f"\n$ {' '.join(words)} --help\n" in page


def _commands(command: Any, words: list[str]) -> Iterator[list[str]]:
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, [*words, name])


def test_rooms_stand_in_the_order_that_is_enforced() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rooms, *inner = (contract["layers"] for contract in project["tool"]["importlinter"]["contracts"][:3])
    page = _read("explanation/architecture.md").partition("## Why one way")[0]
    table, _, inside = page.partition("| inside |")
    shown = [set(re.findall(r"\w+", row[0])) for row in _rows(table)]
    assert shown == [set(re.findall(r"\w+", layer)) for layer in rooms]
    for row, layers in zip(_rows(f"| inside |{inside}"), inner, strict=True):
        depth = {name: number for number, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
        named = [depth[name] for name in re.findall(r"`(\w+)(?:\.py)?`", row[1]) if name in depth]
        assert len(named) > 2 and named == sorted(named), row[0]


def test_decisions_are_numbered_and_have_four_parts() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    for number, page in enumerate(pages, start=1):
        assert page.name.startswith(f"{number:03d}-")
        parts = re.findall(r"(?m)^\*\*(.+?)\.\*\*", page.read_text(encoding="utf-8"))
        assert parts == ["Context", "Decision", "Reason", "What would change it"], page.name


# --- the runner itself ------------------------------------------------------------------------------------------------


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_a_wrong_output_is_found_with_its_line_and_mended_on_request(tmp_path: Path) -> None:
    page = _page(tmp_path, "# Page\n\n```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\nEnd.\n")
    (problem,) = execute.execute(page)
    assert problem.startswith(f"{page}:3 ") and "-3" in problem and "+2" in problem
    assert execute.execute(page, write=True) == []
    assert page.read_text() == "# Page\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\nEnd.\n"
    assert execute.execute(page) == []


def test_an_output_that_the_page_does_not_show_is_found_and_added(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\nprint('new')\n```\n\nText.\n")
    assert len(execute.execute(page)) == 1
    execute.execute(page, write=True)
    assert page.read_text() == "```python\nprint('new')\n```\n\n```text\nnew\n```\n\nText.\n"


def test_failing_block_is_reported_with_its_line_of_the_page(tmp_path: Path) -> None:
    page = _page(tmp_path, "Text.\n\n```python\nx = 1\nx / 0\n```\n")
    (problem,) = execute.execute(page)
    assert "line 5" in problem and "ZeroDivisionError" in problem


def test_blocks_share_one_namespace_and_an_empty_folder(tmp_path: Path) -> None:
    first = "```python\nimport os\nx = os.listdir()\n```\n"
    page = _page(tmp_path, first + "\n```python\nprint(x)\n```\n\n```text\n[]\n```\n")
    assert execute.execute(page) == []


def test_what_is_marked_no_run_is_left_alone(tmp_path: Path) -> None:
    text = "```python no-run\nx / 0\n```\n\n```console no-run\n$ exit 1\n```\n"
    assert execute.execute(_page(tmp_path, text)) == []


def test_commands_answer_line_by_line_with_dots_for_any_lines(tmp_path: Path) -> None:
    good = "```console\n$ printf 'a\\nb\\nc\\n'\na\n...\nc\n$ vitlab --version\nvitlab 0.1.0\n```\n"
    assert execute.execute(_page(tmp_path, good.replace("0.1.0", vitlab.__version__))) == []
    page = _page(tmp_path, "```console\n$ echo out; echo err >&2\nout\n```\n")
    assert len(execute.execute(page)) == 1
    execute.execute(page, write=True)
    assert page.read_text() == "```console\n$ echo out; echo err >&2\nout\nerr\n```\n"


def test_a_broken_or_heavy_picture_fails(tmp_path: Path) -> None:
    heavy = "from PIL import Image\nimport os\nimage = Image.frombytes('RGB', (400, 400), os.urandom(480_000))\n"
    for code, reason in ((heavy + "picture(image, 'x')", "bytes, more than"), ("picture(None, 'x')", "AttributeError")):
        (problem,) = execute.execute(_page(tmp_path, f"```python\n{code}\n```\n"))
        assert reason in problem


def test_the_script_exits_with_1_when_a_page_is_wrong(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\nprint(1)\n```\n")
    command = [sys.executable, str(DOCS / "execute.py"), str(page)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    assert subprocess.run([*command, "--write"], capture_output=True, check=False).returncode == 0
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_every_figure_and_table_of_the_paper_has_a_command_that_there_is() -> None:
    section = _read("explanation/paper-map.md").partition("## Claims, run again")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    numbers: dict[str, set[int]] = {"Figure": set(), "Table": set()}
    for what, _, commands in rows:
        for kind, listed in re.findall(r"(Figure|Table) (\d+(?:, \d+)*)", what):
            numbers[kind] |= set(map(int, listed.split(", ")))
        assert re.findall(r"`vitlab [^`]+`", commands), what
    assert numbers == {"Figure": set(range(1, 15)), "Table": set(range(1, 10))}
    known = {row.name for row in vitlab.list_studies()}
    named = set(re.findall(r"`vitlab study (?:run|report) ([\w-]+)", section))
    assert named <= known and {row.name for row in vitlab.list_studies() if row.kind == "study"} <= named


def test_claims_are_what_the_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.studies.cell_records import read_cells
    from vitlab.studies.claims import ClaimsReport, report_claims

    folder = Path("docs/results/records")
    rows = report_claims(read_cells(DOCS.parent / folder), scale=None, out=None).rows
    monkeypatch.chdir(DOCS.parent)
    made = ClaimsReport(rows, Path("docs/results/claims.md"), folder)
    assert made.markdown() == _read("results/claims.md"), "make results"
    assert made.picture().decode() == _read("results/claims.svg"), "make results"
    summary = (DOCS.parent / "README.md").read_text(encoding="utf-8").partition("docs/results/claims.md): ")[2]
    measured, post_hoc = (re.findall(r"\d+", text) for text in (made.measured(), made.post_hoc()))
    assert re.findall(r"\d+", summary.partition("that hold among")[0]) == [*measured, *post_hoc], "README.md"


def test_pages_of_the_studies_are_those_of_the_records(tmp_path: Path) -> None:
    from vitlab.studies.reporting import report_study
    from vitlab.studies.study_file import list_study_names

    there = {path.name: path.read_bytes() for path in (DOCS / "results" / "studies").iterdir()}
    for name in list_study_names():
        report_study(name, records=DOCS / "results" / "records", out=tmp_path / f"{name}.md")
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(made) == sorted(there) and made == there, "make results"


def test_each_study_has_its_place_in_the_results() -> None:
    from vitlab.studies.study_file import list_study_names

    page = _read("results/studies-h200.md")
    linked = re.findall(r"\]\(studies/([\w-]+)\.md\)", page)
    assert sorted(linked) == list_study_names()
    drawn = re.findall(r"\]\((studies/[\w-]+\.svg)\)", page)
    assert len(drawn) >= len(linked) and all((DOCS / "results" / path).is_file() for path in drawn)
