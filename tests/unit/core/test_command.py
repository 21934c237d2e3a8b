"""The one way to print the command of a run: quoted, without what was left at its default."""

import shlex
from pathlib import Path

from vitlab.core.command import command_line


def test_options_follow_the_arguments_in_the_order_given() -> None:
    options = {"part": "test", "label_map": Path("map.csv"), "seed": 0}
    line = "vitlab evaluate run pets --part test --label-map map.csv --seed 0"
    assert command_line("evaluate", "run", "pets", options=options) == line


def test_what_was_not_given_is_left_out() -> None:
    assert command_line("train", "cats", options={"recipe": None, "force": False, "set": []}) == "vitlab train cats"


def test_flags_have_no_value_and_lists_repeat_their_option() -> None:
    options = {"vtab": True, "task": ["dtd", "svhn"], "set": ("optim.lr=0.1",)}
    line = "vitlab evaluate run --vtab --task dtd --task svhn --set optim.lr=0.1"
    assert command_line("evaluate", "run", options=options) == line


def test_a_verb_of_two_words_and_a_path_with_spaces_survive_a_shell() -> None:
    line = command_line("study report", "table9", options={"records": Path("my runs") / "it's"})
    assert shlex.split(line) == ["vitlab", "study", "report", "table9", "--records", "my runs/it's"]
