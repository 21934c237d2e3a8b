"""The way in and the way out: version, help, exit codes, tracebacks, pipes."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after

from vitlab.cli import main
from vitlab.core.errors import UsageError, VitlabError

Call = Callable[..., Any]

SOAK = os.environ.get("VITLAB_SOAK") == "1"
LOADED = """
import sys
from vitlab.cli.main import main
library, *arguments = sys.argv[1:]
sys.argv = ["vitlab", *arguments]
try:
    main()
finally:
    print(f"loaded: {[name for name in library.split() if name in sys.modules]}", file=sys.stderr)
"""


def test_version_is_the_installed_one(process: Call) -> None:
    assert process("--version") == (0, f"vitlab {metadata.version('vitlab')}\n", "")


def test_python_m_vitlab_is_the_same_command(process: Call) -> None:
    done = subprocess.run([sys.executable, "-m", "vitlab", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == process("--version")


@pytest.mark.parametrize(
    "arguments",
    slow_after(
        4,
        [
            ["--help"],
            ["models", "list"],
            ["data", "list"],
            ["study", "show", "x"],
            ["demo", "--help"],
            ["models", "info", "ViT-B/16", "--json"],
            ["models", "info", "x"],
            ["models", "list", "--pretrained"],
            ["recipes", "list"],
            ["recipes", "show", "cifar10-plain-vit"],
            ["recipes", "show", "x"],
            ["study", "list", "--json"],
            ["study", "show", "positions"],
        ],
    ),
    ids=" ".join,
)
def test_answers_that_need_no_torch_do_not_load_it(arguments: list[str]) -> None:
    assert loaded("torch", *arguments) == "loaded: []"


@pytest.mark.slow
def test_training_in_steps_loads_no_library_for_a_trifle(tmp_path: Path) -> None:
    """A compiler for what is not compiled, an algebra system for empty tensors, a library for one of its files."""
    idle = "torch._dynamo torch._inductor sympy sklearn pandas scipy"
    short = ["--set", "train.steps=1", "--init", "scratch", "--out", str(tmp_path / "run")]
    assert loaded(f"torch {idle}", "train", "digits", "--model", "ViT-w16d1m16h1/16", *short) == "loaded: ['torch']"


def loaded(libraries: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, libraries, *arguments], capture_output=True, text=True, check=False
    )
    return done.stderr.splitlines()[-1]


def seconds(*command: str) -> float:
    """By the processor's clock, which does not count what other work on the machine takes."""
    before = os.times()
    subprocess.run(command, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@functools.cache
def seconds_of_torch(attempt: int) -> float:
    """Of loading it, once for each attempt: all that is listed is held against the same."""
    del attempt
    return seconds(sys.executable, "-c", "import torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--help"], 0.3),
        (["models", "list"], 0.5),
        (["study", "list"], 0.5),  # of what loading torch takes: processors differ by a factor of three
        (["recipes", "list"], 0.5),
        (["recipes", "show", "cifar10-plain-vit"], 0.5),
        (["data", "list"], 0.5),
    ][: 6 if SOAK else 3],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_is_listed_answers_at_once(vitlab: str, arguments: list[str], limit: float) -> None:
    for attempt in range(5):  # the first is enough on an idle machine
        if seconds(vitlab, *arguments) < limit * seconds_of_torch(attempt):
            return
    pytest.fail(f"vitlab {' '.join(arguments)} takes more than {limit} of what loading torch takes")


@pytest.mark.parametrize(
    ("number", "printed"), slow_after(1, [(signal.SIGINT, "stopped"), (signal.SIGTERM, "stopped by SIGTERM")])
)
def test_signal_while_a_library_is_imported_leaves_at_once(
    vitlab: str, tmp_path: Path, number: signal.Signals, printed: str
) -> None:
    """torch and numpy are C++ in large part: some of it swallows what a signal raises, and some aborts."""
    swallows = f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(swallows)
    given = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([vitlab, "predict", "a", "b"], capture_output=True, text=True, check=False, env=given)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"\nvitlab: {printed}\n")


def test_signal_while_python_takes_itself_down_ends_in_silence() -> None:
    late = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    code = f"{late}\nimport sys; from vitlab.cli.main import main; sys.argv = ['vitlab', '--version']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["doctor", "--help"], ["models", "--help"]], ids=str
)
def test_help_goes_to_standard_output(call: Call, arguments: list[str]) -> None:
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert out.lstrip().startswith("Usage: ")


def test_every_option_of_a_verb_is_explained(call: Call) -> None:
    lines = call("demo", "--help").out.splitlines()
    options = [line.strip("│ ").split() for line in lines if line.strip("│ ").startswith("-")]
    names = {word.rstrip(",") for words in options for word in words if word.startswith("--")}
    assert {
        "--out",
        "--set",
        "--device",
        "--seed",
        "--threads",
        "--dry-run",
        "--print-config",
        "--quiet",
        "--json",
    } <= names
    assert all(len(words) > 2 for words in options), "an option without a word of help"


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (VitlabError("it broke", hint="mend it"), 1, "vitlab: it broke\nmend it\n"),
        (UsageError("wrong call"), 2, "vitlab: wrong call\n"),
    ],
)
def test_known_failure_is_its_own_text_and_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: VitlabError, code: int, printed: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    assert call("x") == (code, "", printed)


def test_unexpected_failure_is_owned_up_to_in_two_lines(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(main, "app", fail)
    code, out, err = call("x")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "vitlab: unexpected ZeroDivisionError: division by zero"
    assert "--debug" in err.splitlines()[1]
    assert "Traceback" not in err
    assert "Traceback" in call("x", "--debug").err


@pytest.mark.parametrize("arguments", [["models", "info", "ViT-X/16"], ["demo", "--set", "nope"]], ids=" ".join)
def test_debug_adds_the_traceback_and_changes_nothing_else(call: Call, arguments: list[str]) -> None:
    plain, debug = call(*arguments), call(*arguments, "--debug")
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last)" in debug.err
    assert debug.err.endswith(plain.err)
    assert (plain.code, debug.code, debug.out) == (2, 2, "")


def test_path_that_the_system_refuses_is_named(call: Call) -> None:
    code, out, err = call("evaluate", "a" * 300, "b")
    assert (code in (1, 2), out) == (True, "")
    assert "aaa" in err and "cannot write the output" not in err


# --- pipes ------------------------------------------------------------------------------------------------------------


def into_closed_pipe(vitlab: str, *arguments: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([vitlab, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_closed_pipe_prints_nothing(vitlab: str) -> None:
    assert into_closed_pipe(vitlab, "models", "list")[1] == ""


def test_closed_pipe_exits_with_the_code_of_a_broken_pipe(vitlab: str) -> None:
    assert into_closed_pipe(vitlab, "models", "list")[0] == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_under_standard_output_is_a_failure_without_a_traceback(vitlab: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([vitlab, "models", "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
