"""The list of the mutation check fits the tree: `make mutants` itself takes minutes."""

import runpy
from pathlib import Path

RUNNER = runpy.run_path(str(Path(__file__).parents[1] / "mutants" / "run.py"))


def test_every_mutation_has_its_place_and_its_tests() -> None:
    mutants = RUNNER["read_mutants"]()
    assert RUNNER["problems"](mutants) == []
    assert len(mutants) >= 150


def test_moved_line_and_missing_test_are_reported() -> None:
    moved = RUNNER["Mutant"]("models/ops.py", "no such line", "", ("unit/models/test_ops.py::test_no_such_thing",))
    assert [problem.partition(": ")[2] for problem in RUNNER["problems"]([moved])] == [
        "no such line  ->  nothing: the old text is there 0 times",
        "no such line  ->  nothing: there is no test unit/models/test_ops.py::test_no_such_thing",
    ]
