"""Mutation check: every slip of `mutants.toml`, made in a copy of the source, must fail one of the tests named beside it.

    python tests/mutants/run.py [--parallel N] [--only PATTERN]

A mutant is caught when a test fails that is not marked slow: `make test` would notice it. One that does not even import, or
that runs too long, proves nothing and is broken; one that passes has survived. Either ends with status 1.
"""

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
_SECONDS = 300  # for the tests of one mutant; they need a few on an idle core
_SHARED = ("torch", "scipy.stats", "sklearn.metrics", "safetensors.torch", "pytest")  # imported once for all mutants


class Mutant(NamedTuple):
    file: str  # under src/vitlab
    old: str
    new: str
    tests: tuple[str, ...]  # under tests: files or node ids, as few and as quick as can be

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split()) or 'nothing'}"


def read_mutants() -> list[Mutant]:
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(file, old, new, tuple(tests.split())) for file, rows in table.items() for old, new, tests in rows]


def problems(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the list itself: the text to replace must be there once, and the tests must exist."""
    found: list[str] = []
    for mutant in mutants:
        path = SOURCE / "vitlab" / mutant.file
        times = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
        if times != 1 or mutant.old == mutant.new:
            found.append(f"{mutant}: the old text is there {times} times")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8") if (ROOT / "tests" / file).is_file() else ""
            if f"def {name.partition('[')[0]}" not in text:
                found.append(f"{mutant}: there is no test {test}")
    return found


def start(folder: Path, tests: list[str], seconds: int) -> int:
    """Begins the tests under the source in `folder`. Forked, where torch is there already: importing it takes longer."""
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException), (folder / "log").open("w") as log:
        signal.alarm(seconds)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")
        code = importlib.import_module("pytest").main(
            ["-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        )
        sys.stdout.flush()
        os._exit(code)
    os._exit(os.EX_SOFTWARE)


def verdict(folder: Path, status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "SURVIVED"
    failed = code == 1 and re.search(r"^FAILED ", (folder / "log").read_text(errors="replace"), re.MULTILINE)
    return "caught" if failed else "BROKEN"


def mutate(mutant: Mutant, folder: Path, plain: Path) -> None:
    shutil.copytree(plain, folder / "src")  # with the times of the files: what was compiled stays valid
    path = folder / "src" / "vitlab" / mutant.file
    text = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
    path.unlink()
    path.write_text(text, encoding="utf-8")


def check(mutants: list[Mutant], parallel: int, folder: Path) -> dict[str, int]:
    """How many were caught, survived or broke; a line for each as it ends."""
    counts, left, running = dict.fromkeys(("caught", "SURVIVED", "BROKEN"), 0), list(enumerate(mutants)), {}
    while left or running:
        while left and len(running) < parallel:
            number, mutant = left.pop(0)
            own = folder / str(number)
            mutate(mutant, own, folder / "src")
            running[start(own, list(mutant.tests), _SECONDS)] = mutant, own
        pid, status = os.wait()
        mutant, own = running.pop(pid)
        found = verdict(own, status)
        counts[found] += 1
        print(f"{found:8}  {mutant}", flush=True)
        if found == "BROKEN":
            print((own / "log").read_text(errors="replace"), flush=True)
        shutil.rmtree(own)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", default="", help="a regular expression in the file, the change or the tests")
    given = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if re.search(given.only, f"{mutant} {' '.join(mutant.tests)}")]
    if wrong := problems(mutants):
        print(*wrong, sep="\n")
        return 1
    began = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _SHARED:
        importlib.import_module(name)
    os.chdir(ROOT / "tests")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        pid = start(folder, sorted({test for mutant in mutants for test in mutant.tests}), 0)
        if os.waitpid(pid, 0)[1]:
            print((folder / "log").read_text(errors="replace"), "The tests do not pass without any mutation.", sep="\n")
            return 1
        print(f"without any mutation all tests pass, {time.perf_counter() - began:.0f} s", flush=True)
        counts = check(mutants, given.parallel, folder)
    summary = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"{summary} of {len(mutants)}, {time.perf_counter() - began:.0f} s")
    return int(counts["caught"] != len(mutants) or not mutants)


if __name__ == "__main__":
    sys.exit(main())
