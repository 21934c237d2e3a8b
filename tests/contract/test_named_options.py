"""A message never names an option that there is not: every `--option` in a text of the source is one of some verb's."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from vitlab.cli.main import app

SOURCE = Path(__file__).parents[2] / "src" / "vitlab"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
OF_OTHERS = {  # programs that are not vitlab
    "--force-reinstall": "pip's: a Pillow that was built without a decoder",
    "--shm-size": "docker's: room for shared memory",
    "--sparse": "tar's: an archive that is not read",
}
OF_WORKERS = {
    "--study",
    "--heartbeat",
    "--lease-timeout",
    "--call",
    "--parent",
    "--timed-threads",
}  # of `python -m vitlab.studies.worker`, which `vitlab study run` starts
WORKER_FILES = ("studies/worker.py", "studies/study_run.py")
OF_ANOTHER_NAME = {  # what others call our options: the table that answers them
    "cli/options.py": "_FOREIGN",
}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every verb of the command, by its words."""
    if hasattr(command, "commands"):
        for word, inner in command.commands.items():
            yield from commands(inner, f"{name} {word}".strip())
    else:
        yield name, command


def flags(command: Any) -> set[str]:
    shown = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    return shown | {"--help", "--version"}


VERBS = {name: flags(command) for name, command in commands(typer.main.get_command(app))}
EVERY = set[str]().union(*VERBS.values())
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@functools.cache
def texts(path: str) -> tuple[str, ...]:
    """What a user may read: text in the source, but for docstrings and the table of foreign names."""
    source = (SOURCE / path).read_text()
    if not OPTION.search(source):  # nothing that a test here would look at, and parsing all takes seconds
        return ()
    tree = ast.parse(source)
    skipped = set[int]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            skipped.add(id(body[0].value))
        if path in OF_ANOTHER_NAME and isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            skipped |= {id(each) for each in ast.walk(node) if OF_ANOTHER_NAME[path] in names}
    return tuple(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped
    )


def options_of(path: str) -> set[str]:
    return {option for text in texts(path) for option in OPTION.findall(text)}


def test_every_option_in_a_text_is_one_of_some_verb() -> None:
    for path in FILES:
        named = options_of(path) - (OF_WORKERS if path in WORKER_FILES else set())
        assert named - EVERY - OF_OTHERS.keys() == set(), path


def test_what_reads_and_writes_weights_names_options_of_convert_alone() -> None:
    """`convert` is the one verb that takes all that can be stated about a file; others may lack the option, or mean another."""
    for path in (path for path in FILES if path.startswith("weights/")):
        assert options_of(path) - VERBS["convert"] - {"--pretrained"} == set(), (
            f"{path}; `vitlab models list --pretrained` aside"
        )


def test_an_option_after_a_verb_is_one_of_that_verb() -> None:
    for where, text in ((path, text) for path in FILES for text in texts(path)):
        for found in re.finditer(r"vitlab ([a-z]+(?: [a-z]+)?)\b([^`.,;:)\n]*)", text):
            words, rest = found[1].split(), found[2]
            name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in VERBS), None)
            if name is not None:
                assert set(OPTION.findall(rest)) <= VERBS[name], (where, text)


def test_foreign_programs_are_still_named() -> None:
    assert set(OF_OTHERS) <= set[str]().union(*map(options_of, FILES))
