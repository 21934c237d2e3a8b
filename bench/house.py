"""Measure how much of the package a reader has to open: traced runs, sizes, long calls and functions, import depth.

    make house                                 (or: python bench/house.py [--json] [--check])

`house_trace.py` traces two real calls and says what *touched*, *opened* and *on the walk* mean. All else is read from the
syntax tree: lines are counted with blank ones and comments, parameters without `self`, and imports at the top of a module
only. What a new measure or model family will need cannot be measured; what the present ones need can: the files that name
one, in code, text or comments. Of all measures, and of all families, the one that the fewest files name is shown. `LIMITS`
holds the wanted figures, and those that `tests/contract/test_house.py` keeps meanwhile.
"""

import argparse
import ast
import graphlib
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vitlab"
TESTS = ROOT / "tests"
TRACE = Path(__file__).with_name("house_trace.py")
MANY_PARAMETERS, LONG_FILE = 8, 400


class Limit(NamedTuple):
    what: str
    wanted: int | None  # None: shown, not judged
    kept: int | None = None  # the figure of today, which a test keeps: lower it whenever the figure falls


LIMITS = {
    "train_walk": Limit("files on the walk from `vitlab train` to its update; no libraries", 9, 9),
    "train_opened": Limit("- with the libraries: core, data, models, weights, as called there", None, 24),
    "train_touched": Limit("- files touched", None),
    "evaluate_walk": Limit("files on the walk of `vitlab evaluate`; no libraries", 7, 7),
    "evaluate_opened": Limit("- with the libraries, as called there", None, 14),
    "evaluate_touched": Limit("- files touched", None),
    "upward_calls": Limit("calls from a room into one above it, at a landmark", 0, 0),
    "runs_files": Limit("`runs/`: files", 25, 25),
    "runs_lines": Limit("`runs/`: lines", 5_600, 5_600),
    "lines": Limit("source lines in all", 27_000),
    "many_parameters": Limit("functions with more than 8 parameters", 6, 0),
    "many_parameters_inside": Limit("- of which neither a verb nor a public function", 0, 0),
    "import_cycles": Limit("import cycles", 0, 0),
    "measure": Limit("files, tests included, that name the measure named by the fewest", 3, 3),
    "family": Limit("source files that name the model family named by the fewest", 5, 5),
}

# --- the source, by its syntax tree -----------------------------------------------------------------------------------


class Function(NamedTuple):
    file: str
    name: str
    parameters: int
    lines: int


def functions(trees: Mapping[str, ast.Module]) -> list[Function]:
    """Every function and method of `trees`."""
    found: list[Function] = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                found.append(Function(file, node.name, count, (node.end_lineno or node.lineno) - node.lineno + 1))
    return found


def public_functions(init: ast.Module) -> set[tuple[str, str]]:
    """File and name of what the package's `__init__.py` imports, which is all that is public."""
    return {
        (f"{node.module.removeprefix('vitlab.').replace('.', '/')}.py", alias.name)
        for node in ast.walk(init)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def is_verb(function: Function, public: set[tuple[str, str]]) -> bool:
    is_command = function.file.startswith("cli/") and function.file.endswith("_verb.py")
    return is_command or (function.file, function.name) in public


def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules of the package each one imports at its top; not what functions or type checkers import."""
    modules = {_module(file): tree for file, tree in trees.items()}
    return {
        module: {name for node in tree.body for name in _imported(node) if name in modules and name != module}
        for module, tree in modules.items()
    }


def _module(file: str) -> str:
    return ".".join(["vitlab", *file.removesuffix(".py").split("/")]).removesuffix(".__init__")


def _imported(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def longest_chain(needs: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one the next, the first of them imported by none; of several chains, the longest."""
    chains: dict[str, list[str]] = {}
    for module in graphlib.TopologicalSorter(needs).static_order():
        chains[module] = [module, *max((chains[need] for need in sorted(needs[module])), key=len, default=[])]
    return max(chains.values(), key=len, default=[])


def cycles(needs: Mapping[str, set[str]]) -> list[list[str]]:
    """Import cycles that have no import in common."""
    left, found = {module: set(names) for module, names in needs.items()}, list[list[str]]()
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
            return found
        except graphlib.CycleError as error:
            ring: list[str] = error.args[1]  # each is needed by the next, and the first stands at the end again
            found.append(ring)
            for need, module in itertools.pairwise(ring):
                left[module].discard(need)


def read_measures(tree: ast.Module) -> list[str]:
    """The key of every row of `MEASURES`."""
    return [str(ast.literal_eval(call.args[0])) for call in _calls(tree, "Measure")]


def read_families(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """The spec of every family, and the file of its modules without its ending."""
    for call in (
        call for file, tree in trees.items() if file.endswith("_family.py") for call in _calls(tree, "Family")
    ):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        place, _, _ = str(ast.literal_eval(given["module"])).partition(":")
        yield ast.unparse(given["spec"]), place.rpartition(".")[2]


def _calls(tree: ast.Module, function: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function]


def files_that_name(texts: Mapping[str, str], *names: str) -> list[str]:
    """Those with one of the names as a word or as a part of one, between underscores: `brier` also in `brier_scores`."""
    word = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(names)})(?![A-Za-z0-9])")
    return [file for file, text in texts.items() if word.search(text)]


def read_source(source: Path = SOURCE) -> dict[str, Any]:
    """All figures that need no run."""
    texts = {path.relative_to(source).as_posix(): path.read_text("utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    lines = {file: text.count("\n") for file, text in texts.items()}  # as `wc -l` counts
    rooms: dict[str, dict[str, int]] = {}
    for file, count in lines.items():
        size = rooms.setdefault(file.partition("/")[0] if "/" in file else ".", {"files": 0, "lines": 0})
        size["files"] += 1
        size["lines"] += count
    every, public, needs = functions(trees), public_functions(trees["__init__.py"]), imports(trees)
    many = sorted((each for each in every if each.parameters > MANY_PARAMETERS), key=lambda each: -each.parameters)
    runs = {
        module: {name for name in names if ".runs." in name} for module, names in needs.items() if ".runs." in module
    }
    rings = cycles(needs)
    tests = {f"tests/{path.relative_to(TESTS)}": path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    measures = {key: files_that_name(texts | tests, key) for key in read_measures(trees["evaluation/measures.py"])}
    families = {spec: files_that_name(texts, spec, module) for spec, module in read_families(trees)}
    measure, family = (min(found, key=lambda name: len(found[name])) for found in (measures, families))
    return {
        "rooms": rooms,
        "runs_files": rooms["runs"]["files"],
        "runs_lines": rooms["runs"]["lines"],
        "lines": sum(lines.values()),
        "many_parameters": [[each.file, each.name, each.parameters] for each in many],
        "many_parameters_inside": [[e.file, e.name, e.parameters] for e in many if not is_verb(e, public)],
        "longest_functions": [[e.file, e.name, e.lines] for e in sorted(every, key=lambda e: -e.lines)[:10]],
        "long_files": [[file, n] for file, n in sorted(lines.items(), key=lambda row: -row[1]) if n > LONG_FILE],
        "import_cycles": rings,
        "measure": measures[measure],
        "family": families[family],
        "named": {"measure": measure, "family": family},
        "import_chain": [] if rings else longest_chain(needs),
        "import_chain_in_runs": [] if rings else longest_chain(runs),
    }


# --- traced runs ------------------------------------------------------------------------------------------------------


def read_trace() -> dict[str, Any]:
    """What `house_trace.py` prints, one figure for each verb and count."""
    path = os.pathsep.join([str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}  # this tree, whichever is installed
    ran = subprocess.run([sys.executable, TRACE], check=False, env=environment, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        sys.exit(f"{TRACE.name} failed; its error stands above")
    traced: dict[str, dict[str, Any]] = json.loads(ran.stdout)
    figures = {f"{verb}_{name}": figure for verb, found in traced.items() for name, figure in found.items()}
    stacks = [stack for found in traced.values() for stack in found["landmarks"].values()]
    return {**figures, "upward_calls": upward_calls(stacks, read_layers())}


def read_layers() -> dict[str, int]:
    """The height of each room, by the layers that the import linter checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["vitlab"])
    return {room: height for height, names in enumerate(reversed(layers)) for room in names.split(" | ")}


def upward_calls(stacks: list[list[str]], height: Mapping[str, int]) -> list[list[str]]:
    """Pairs of files where the first calls the second, which stands in a higher room: a function that was handed down."""
    pairs = {(low, high) for stack in stacks for low, high in itertools.pairwise(stack)}
    return sorted([low, high] for low, high in pairs if height[high.partition("/")[0]] > height[low.partition("/")[0]])


# --- the table --------------------------------------------------------------------------------------------------------


def number(figure: Any) -> int:
    return figure if isinstance(figure, int) else len(figure)


def not_as_wanted(figures: Mapping[str, Any]) -> list[str]:
    wanted = {name: limit.wanted for name, limit in LIMITS.items() if limit.wanted is not None}
    return [name for name, most in wanted.items() if number(figures[name]) > most]


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {'':<66} |    now |   wanted |   |"
    yield f"|{'-' * 68}|-------:|---------:|---|"
    above = not_as_wanted(figures)
    for name, limit in LIMITS.items():
        wanted = "–" if limit.wanted is None else f"≤ {limit.wanted:,}"
        yield f"| {limit.what:<66} | {number(figures[name]):>6,} | {wanted:>8} | {'✗' if name in above else ' '} |"


def details(figures: Mapping[str, Any]) -> Iterator[str]:
    for verb in ("train", "evaluate"):
        yield f"\nThe walk of `vitlab {verb}`: {', '.join(figures[f'{verb}_walk'])}"
        for landmark, stack in figures[f"{verb}_landmarks"].items():
            yield f"  {landmark:<16} {' > '.join(stack)}"
    yield from (f"  {low} calls up into {high}" for low, high in figures["upward_calls"])
    for what, name in figures["named"].items():
        yield f"\nFiles that name {name}, the {what} that fewest name: {', '.join(figures[what])}"
    yield "\nRooms: files, lines"
    yield from (f"  {room:<12} {size['files']:>4} {size['lines']:>7,}" for room, size in figures["rooms"].items())
    yield f"\nFunctions with more than {MANY_PARAMETERS} parameters; * neither a verb nor public"
    inside = figures["many_parameters_inside"]
    yield from (f"  {row[2]:>4} {row[0]}: {row[1]}{' *' * (row in inside)}" for row in figures["many_parameters"])
    yield "\nLongest functions, in lines"
    yield from (f"  {lines:>4} {file}: {name}" for file, name, lines in figures["longest_functions"])
    yield f"\nFiles over {LONG_FILE} lines"
    yield from (f"  {lines:>4} {file}" for file, lines in figures["long_files"])
    for name, where in (("import_chain", "the package"), ("import_chain_in_runs", "`runs/`")):
        yield f"\nLongest chain of imports within {where}: {len(figures[name])} modules"
        yield f"  {' > '.join(module.removeprefix('vitlab.') for module in figures[name])}"
    yield from (f"Import cycle: {' > '.join(ring)}" for ring in figures["import_cycles"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how much of the package a reader has to open.")
    parser.add_argument("--json", action="store_true", help="all figures, with the names behind them")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a wanted figure does not hold")
    given = parser.parse_args()
    figures = {**read_source(), **read_trace()}
    print(json.dumps(figures, indent=2) if given.json else "\n".join([*table(figures), *details(figures)]))
    if given.check and (above := not_as_wanted(figures)):
        sys.exit(f"not as wanted: {', '.join(above)}")


if __name__ == "__main__":
    main()
