"""Progress and messages on standard error: live, plain when piped, or quiet.

All of it goes to standard error; standard output belongs to results.
"""

import contextlib
import time
from collections.abc import Callable, Generator

import rich.console
import rich.progress

from vitlab.core.errors import printable

Advance = Callable[[int, str], None]

_PLAIN_LINES = 10  # per piece of work, when there is no terminal to redraw
_REDRAWS_PER_SECOND = 8


class Console:
    """`quiet` prints nothing; `verbose` also prints what else only the log has, such as how positions were resized."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet, self.verbose = quiet, verbose
        self.lines: list[str] = []  # everything printed, for the run's log.txt
        self._out = rich.console.Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        text = printable(text)
        self.lines.append(text)
        style = "yellow" if text.startswith("warning:") else None
        self._out.print(text, markup=False, emoji=False, style=style)

    def detail(self, text: str) -> None:
        """Print if verbose; always add to the log."""
        if self.verbose:
            self.say(text)
        else:
            self.lines.append(printable(text))

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        """Show progress; yields `advance(done, note)`, with loss, speed ... as the note."""
        label = printable(label)
        show = self._bar(label, total) if self._out.is_terminal and not self.quiet else self._plain(label, total)
        with show as advance:
            yield lambda done, note: advance(done, printable(note))

    @contextlib.contextmanager
    def _bar(self, label: str, total: int) -> Generator[Advance]:
        columns = (
            rich.progress.TextColumn("{task.description:<10}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.completed}/{task.total} {task.fields[note]}", markup=False),
        )
        last = ""
        with rich.progress.Progress(*columns, console=self._out, refresh_per_second=_REDRAWS_PER_SECOND) as bar:
            task = bar.add_task(label, total=total, note="")

            def advance(done: int, note: str) -> None:
                nonlocal last
                last = f"{label:<10} {done}/{total} {note}"
                bar.update(task, completed=done, note=note)

            yield advance
        self.lines.append(last)

    @contextlib.contextmanager
    def _plain(self, label: str, total: int) -> Generator[Advance]:
        shown = 0

        def advance(done: int, note: str) -> None:
            nonlocal shown
            if done * _PLAIN_LINES // total > shown or done == total:
                shown = done * _PLAIN_LINES // total
                self.say(f"{label:<10} {done}/{total} {note}")

        yield advance


def seconds_left(started: float, done: int, total: int) -> str:
    """Estimate the remaining time from the pace so far, as `m:ss`."""
    if done == 0 < total:
        return "?"
    left = (time.perf_counter() - started) / max(1, done) * (total - done)
    return f"{int(left) // 60}:{int(left) % 60:02d}"
