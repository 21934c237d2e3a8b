"""`vitlab ARGUMENTS` in a forked child: its own folder, streams and signals, without the seconds that importing torch takes.

What a fresh interpreter adds is tested elsewhere: tests/unit/cli/test_main.py, and T04 of tests/system.
"""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import vitlab.cli.main  # it and the next are here, so that those who are forked need not wait for them
import vitlab.pipelines.digits_demo
import vitlab.runs.evaluation.embedding  # noqa: F401

PATIENCE_S = 300


class Command:
    """Runs at once; `stderr` can be read while it does. Output has to fit in a pipe (64 KB on Linux)."""

    def __init__(self, arguments: Sequence[str], folder: Path, prepare: Callable[[], None] | None = None) -> None:
        out, err = os.pipe(), os.pipe()
        child = multiprocessing.get_context("fork").Process(
            target=_run, args=(list(arguments), folder, out[1], err[1], prepare)
        )
        with warnings.catch_warnings():  # from 3.12 on: of a fork beside other threads, which a test worker has
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        os.close(out[1])
        os.close(err[1])
        self._child, self._stdout = child, os.fdopen(out[0])
        self.stderr: IO[str] = os.fdopen(err[0])

    def send_signal(self, number: int) -> None:
        assert self._child.pid is not None
        os.kill(self._child.pid, number)

    def end(self) -> tuple[int | None, str, str]:
        """Exit status, standard output, and what is left of standard error."""
        with self._stdout, self.stderr:
            rest, out = self.stderr.read(), self._stdout.read()
        self._child.join(PATIENCE_S)
        return self._child.exitcode, out, rest

    def kill(self) -> None:
        """For a `finally`: whatever failed, no child stays."""
        self._child.kill()
        self._child.join(PATIENCE_S)


def _run(arguments: list[str], folder: Path, out: int, err: int, prepare: Callable[[], None] | None) -> None:
    from vitlab.__main__ import main

    os.dup2(out, 1)
    os.dup2(err, 2)
    # Those of pytest write into its own files.
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    warnings.resetwarnings()
    os.chdir(folder)
    sys.argv = ["vitlab", *arguments]
    if prepare:
        prepare()
    main()
