"""The command, called in this process (quick, exact) or as a process of its own (real)."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from vitlab.cli import main


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def built_app() -> Any:
    """The command with all its verbs; typer would build it again in every call, which takes longer than most of them."""
    return typer.main.get_command(main.app)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, built_app: Any
) -> Callable[..., Said]:
    """Runs `vitlab ARGUMENTS` in an empty folder, without the cost of a new process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "app", built_app)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["vitlab", *arguments])
        capsys.readouterr()
        code = main._run("--debug" in arguments)
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def vitlab() -> str:
    """The installed command."""
    return str(Path(sys.executable).with_name("vitlab"))


@pytest.fixture
def process(vitlab: str, tmp_path: Path) -> Callable[..., Said]:
    """Runs `vitlab ARGUMENTS` as a real process in an empty folder."""

    def run(*arguments: str) -> Said:
        done = subprocess.run([vitlab, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
        return Said(done.returncode, done.stdout, done.stderr)

    return run
