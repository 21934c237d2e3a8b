"""The interface that is promised, as a table: promise, tests, state. `make contract` prints it.

Exits with status 1 where a promise has no test, or names one that does not exist.
"""

import ast
import functools
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
GROUPS = ("Names", "Python", "Command line", "JSON keys", "On disk", "Set-up")


@dataclass(frozen=True)
class Promise:
    group: str
    promise: str
    tests: tuple[str, ...] = ()
    planned: str = ""  # `verb NAME` or `model NAME` that does not exist yet

    @property
    def state(self) -> str:
        return "planned" if self.planned else "tested"


def read_promises() -> list[Promise]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["promise"]
    return [Promise(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows]


def problems(promises: list[Promise]) -> list[str]:
    """What is wrong with the table itself, a sentence for each."""
    found = [f"no such group: {one.group}" for one in promises if one.group not in GROUPS]
    found += [
        f"neither tests nor planned, or both: {one.promise}" for one in promises if bool(one.tests) == bool(one.planned)
    ]
    found += [f"there is no test {name}: {one.promise}" for one in promises for name in one.tests if not exists(name)]
    return found


def exists(name: str) -> bool:
    file, _, test = name.partition("::")
    return test.startswith("test_") and test in functions_of(TESTS / file)


@functools.cache
def functions_of(file: Path) -> frozenset[str]:
    """What pytest would collect there: functions at the top of the module."""
    if not file.is_file():
        return frozenset()
    return frozenset(
        node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)
    )


def is_slow(name: str) -> bool:
    """Whether all cases of a test are marked slow, by itself or with its module."""
    file, _, test = name.partition("::")
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    marks = [
        ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            marks += [ast.unparse(mark) for mark in node.decorator_list if not isinstance(mark, ast.Call)]
    return any("pytest.mark.slow" in mark for mark in marks)


def table(promises: list[Promise]) -> list[str]:
    """Lines of Markdown."""
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", f"## {group}", "", "| promise | test | state |", "|---|---|---|"]
        for one in promises:
            if one.group == group:
                lines.append(f"| {one.promise} | {' · '.join(one.tests) or '-'} | {one.state} |")
    planned = sum(one.state == "planned" for one in promises)
    return [*lines[1:], "", f"{len(promises) - planned} promises tested, {planned} planned"]


if __name__ == "__main__":
    promised = read_promises()
    print("\n".join(table(promised)))
    wrong = problems(promised)
    print("".join(f"{sentence}\n" for sentence in wrong), end="", file=sys.stderr)
    sys.exit(bool(wrong))
