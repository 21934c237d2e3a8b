"""The table of verbs names public functions, and the options that they take."""

import inspect

import pytest

import vitlab
from vitlab.cli.verbs import VERBS, Row, imported
from vitlab.options.option import declared


@pytest.mark.parametrize("row", VERBS, ids=lambda row: row.name)
def test_verb_is_a_public_function_with_the_same_options(row: Row) -> None:
    names = {option.name for option in declared(row.options)}
    function = imported(row.function)
    assert function is getattr(vitlab, row.function.rpartition(":")[2])
    assert set(inspect.signature(function).parameters) == names
    if row.config:
        assert set(inspect.signature(imported(row.config)).parameters) == names


@pytest.mark.parametrize("row", VERBS, ids=lambda row: row.name)
def test_example_is_of_its_own_verb(row: Row) -> None:
    assert row.example.startswith(row.name)
