"""`bench/house.py` counts correctly, and what it counts does not grow."""

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "house.py"
HOUSE = runpy.run_path(str(SCRIPT))
TRACE = runpy.run_path(str(SCRIPT.with_name("house_trace.py")))
KEPT = {name: limit.kept for name, limit in HOUSE["LIMITS"].items() if limit.kept is not None}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    ran = subprocess.run([sys.executable, SCRIPT, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", KEPT)
def test_no_figure_is_above_what_is_kept(figures: dict[str, Any], name: str) -> None:
    assert HOUSE["number"](figures[name]) <= KEPT[name], figures[name]


def test_the_count_of_files_to_the_update_is_kept() -> None:
    assert {"train_walk", "train_opened", "evaluate_opened", "many_parameters"} <= set(KEPT)


def test_a_traced_run_goes_from_the_public_function_to_the_model_and_the_update(figures: dict[str, Any]) -> None:
    landmarks = figures["train_landmarks"]
    assert all(stack[0] == "runs/training/training_run.py" for stack in landmarks.values())
    assert landmarks["forward pass"][-1].startswith("models/")
    assert landmarks["optimiser step"][-1].startswith("training/")
    assert set(figures["train_walk"]) <= set(figures["train_opened"]) <= set(figures["train_touched"])


def test_every_figure_of_the_table_is_measured_and_shown(figures: dict[str, Any]) -> None:
    shown = "\n".join(HOUSE["table"](figures))
    assert all(limit.what in shown for limit in HOUSE["LIMITS"].values())


def test_a_figure_above_the_wanted_one_is_reported() -> None:
    fine = {name: limit.wanted or 0 for name, limit in HOUSE["LIMITS"].items()}
    assert HOUSE["not_as_wanted"](fine) == []
    assert HOUSE["not_as_wanted"]({**fine, "train_walk": ["file.py"] * 10, "train_touched": 1000}) == ["train_walk"]


def test_a_landmark_that_does_not_occur_is_an_error() -> None:
    tracer = TRACE["Tracer"]("optimiser step")
    tracer.note("data opened", sys._getframe())
    with pytest.raises(TRACE["MissingLandmark"], match=r"train.*forward pass"):
        TRACE["finish"](tracer, "train", ["data opened", "forward pass"])


def test_a_landmark_keeps_its_first_stack_or_the_last_before_another() -> None:
    tracer, frame = TRACE["Tracer"]("end"), sys._getframe()
    for time in range(3):
        tracer._files[__file__] = f"data/{time}.py"
        tracer.note("first", frame)
        tracer.note("last", frame, before="other")
        if time == 1:
            tracer.note("other", frame)
    assert tracer.stacks == {"first": ["data/0.py"], "last": ["data/1.py"], "other": ["data/1.py"]}


def test_parameters_are_counted_without_self() -> None:
    tree = ast.parse("class A:\n def f(self, a, /, b=1, *args, c, **rest):\n  pass\nasync def g(x): pass\n")
    assert [tuple(found) for found in HOUSE["functions"]({"a.py": tree})] == [("a.py", "g", 1, 1), ("a.py", "f", 3, 2)]


def test_verbs_are_commands_and_public_functions() -> None:
    public = HOUSE["public_functions"](ast.parse("if T:\n    from vitlab.runs.run import train as train\n"))
    verbs = [("cli/a_verb.py", "run"), ("runs/run.py", "train")]
    others = [("cli/options.py", "run"), ("runs/run.py", "resolve"), ("runs/other.py", "train")]
    found = [name for name in verbs + others if HOUSE["is_verb"](HOUSE["Function"](*name, 9, 1), public)]
    assert found == verbs


def test_measures_and_families_are_found_with_the_files_that_name_them(figures: dict[str, Any]) -> None:
    tree = ast.parse("MEASURES = (Measure('brier', form='.2%'), Measure('ece'))\n")
    assert HOUSE["read_measures"](tree) == ["brier", "ece"]
    family = ast.parse("A = Family(spec=ASpec, module='vitlab.models.a_net:Net')\n")
    assert list(HOUSE["read_families"]({"models/a_family.py": family, "models/b.py": family})) == [("ASpec", "a_net")]
    texts = {"1.py": "brier_scores(x)", "2.py": "# of brier", "3.py": "embriers, Brier", "4.py": "'a_net'"}
    assert HOUSE["files_that_name"](texts, "brier") == ["1.py", "2.py"]
    assert HOUSE["files_that_name"](texts, "ASpec", "a_net") == ["4.py"]
    assert "evaluation/measures.py" in figures["measure"] and "models/families.py" in figures["family"]


def test_imports_are_those_at_the_top_of_a_module() -> None:
    texts = {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/b.py": "import torch\nfrom vitlab.a import c\nfrom vitlab import d\nif TYPE_CHECKING:\n    import vitlab.e\n",
        "a/c.py": "from vitlab.d import name\ndef f():\n    import vitlab.a.b\n",
        "d.py": "import vitlab.e\n",
        "e.py": "",
    }
    needs = HOUSE["imports"]({file: ast.parse(text) for file, text in texts.items()})
    assert needs["vitlab.a.b"] == {"vitlab", "vitlab.a", "vitlab.a.c", "vitlab.d"}
    assert HOUSE["longest_chain"](needs) == ["vitlab.a.b", "vitlab.a.c", "vitlab.d", "vitlab.e"]
    assert HOUSE["cycles"](needs) == []


def test_import_cycles_are_found() -> None:
    needs = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}}
    assert sorted(sorted(set(ring)) for ring in HOUSE["cycles"](needs)) == [["a", "b", "c"], ["d", "e"]]


def test_a_function_that_was_handed_down_is_a_call_upwards() -> None:
    height = HOUSE["read_layers"]()
    assert height["cli"] > height["runs"] > height["training"] == height["evaluation"] > height["core"] == 0
    stacks = [["cli/a_verb.py", "runs/run.py", "training/loop.py", "runs/run.py", "data/loader.py"]]
    assert HOUSE["upward_calls"](stacks, height) == [["training/loop.py", "runs/run.py"]]
