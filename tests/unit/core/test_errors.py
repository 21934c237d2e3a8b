"""Errors are a few lines for people: what happened, and what to do next."""

import pytest

from vitlab.core.errors import FileProblem, MissingExtra, UnknownName, UsageError, VitlabError, nearest_names

MODELS = ["ViT-S/16", "ViT-B/16", "ViT-L/16", "ViT-H/14", "BiT-R50x1"]


def test_hint_stands_on_a_line_of_its_own() -> None:
    assert str(VitlabError("it broke", hint="mend it")) == "it broke\nmend it"
    assert str(VitlabError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VitlabError("x"), 1),
        (FileProblem("x"), 1),
        (MissingExtra("p", "e", "this"), 1),
        (UsageError("x"), 2),
        (UnknownName("k", "g", []), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_status_distinguishes_failed_work_from_a_wrong_call(error: VitlabError, code: int) -> None:
    assert error.exit_code == code


def test_unknown_name_reads_as_a_sentence_not_as_a_repr() -> None:
    error = UnknownName("model", "ViT-X/16", MODELS, hint="See the list.")
    assert str(error) == "unknown model 'ViT-X/16'\nNearest: ViT-S/16, ViT-B/16, ViT-L/16. See the list."


def test_a_name_that_is_near_none_is_answered_without_guesses() -> None:
    assert (
        str(UnknownName("data set", "nosuchthing", ["svhn", "smallnorb-azimuth"] * 11))
        == "unknown data set 'nosuchthing'"
    )


def test_a_word_in_common_is_near_however_long_the_rest() -> None:
    assert UnknownName("recipe", "mae", ["cifar10-after-mae", "demo-digits"]).nearest == ["cifar10-after-mae"]


def test_names_of_a_short_table_are_all_listed_and_not_twice() -> None:
    error = UnknownName("value for pool:", "mean", ["cls", "gap", "map"], list_all=True)
    assert str(error) == "unknown value for pool: 'mean'\nAllowed: cls, gap, map."


def test_a_short_table_is_listed_where_nothing_is_near() -> None:
    assert str(UnknownName("class", "blue", ["red", "green"])).endswith("\nAllowed: red, green.")
    assert str(UnknownName("class", "gren", ["red", "green"])).endswith("\nNearest: green.")


def test_nearest_names_are_three_however_far() -> None:
    assert nearest_names("zzz", ["one", "two", "three", "four"]) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("family", "error"),
    [
        (ValueError, UsageError("x")),
        (KeyError, UnknownName("k", "g", [])),
        (ImportError, MissingExtra("p", "e", "this")),
    ],
)
def test_errors_can_be_caught_as_their_builtin_kin(family: type[Exception], error: VitlabError) -> None:
    assert isinstance(error, family)


def test_missing_extra_gives_the_exact_install_line() -> None:
    assert str(MissingExtra("scikit-learn", "demo", "the digits")).endswith("pip install 'vitlab[demo]'")


def test_nearest_three_come_best_first() -> None:
    assert nearest_names("ViT-B/61", MODELS)[0] == "ViT-B/16"
    assert len(nearest_names("ViT-B/61", MODELS)) == 3


def test_nearest_ignores_case_and_keeps_names_that_differ_by_case_only() -> None:
    assert nearest_names("VIT-H/14", MODELS)[0] == "ViT-H/14"
    assert set(nearest_names("vit-g/14", ["ViT-g/14", "ViT-G/14"])) == {"ViT-g/14", "ViT-G/14"}
