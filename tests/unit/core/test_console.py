"""People get live progress, pipes get a few plain lines, and quiet means quiet. Nothing goes to standard output."""

import os
import pty
import subprocess
import sys
import time

import pytest

from vitlab.core.console import Console, seconds_left
from vitlab.core.errors import printable


def work(console: Console, total: int) -> None:
    with console.progress("training", total) as advance:
        for done in range(1, total + 1):
            advance(done, f"loss {done}")


@pytest.mark.parametrize("total", [1, 3, 10, 11, 1000, 12_345])
def test_piped_progress_is_a_few_plain_lines_and_ends_with_the_last_step(
    capsys: pytest.CaptureFixture[str], total: int
) -> None:
    work(Console(), total)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert min(total, 10) <= len(lines) <= 11
    assert lines[-1] == f"training   {total}/{total} loss {total}"
    assert "\x1b" not in err


def test_quiet_shows_nothing_but_keeps_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.say("hello")
    work(console, 20)
    assert capsys.readouterr() == ("", "")
    assert console.lines[0] == "hello"
    assert console.lines[-1] == "training   20/20 loss 20"


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/]", "runs/a[1]/b", "x" * 300, "50 % of 3 > 2"])
def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Console().say(text)
    assert capsys.readouterr().err == text + "\n"


def test_path_with_colons_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Console().say("runs/:key:/x")
    assert capsys.readouterr().err == "runs/:key:/x\n"


def test_terminal_gets_a_live_bar_and_the_log_one_line() -> None:
    code = (
        "from vitlab.core.console import Console\n"
        "c = Console()\n"
        "with c.progress('training', 50) as advance:\n"
        "    for i in range(1, 51): advance(i, 'loss')\n"
        "print(c.lines)"
    )
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        stderr=follower,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(follower)
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "\x1b[" in shown
    assert "50/50 loss" in shown
    assert done.stdout.strip() == "['training   50/50 loss']"


def test_time_left_follows_the_pace_so_far() -> None:
    assert seconds_left(time.perf_counter() - 10, done=1, total=14) in ("2:10", "2:11")
    assert seconds_left(time.perf_counter() - 10, done=14, total=14) == "0:00"
    assert seconds_left(0.0, done=0, total=14) == "?"
    assert seconds_left(0.0, done=0, total=0) == "0:00"


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "\x07", "\x9b31m", "\u202eabc", "\u2066x", "\udcff", "\r", "\x7f", "\u2028"]
)
def test_control_characters_are_shown_and_logged_as_escapes(capsys: pytest.CaptureFixture[str], text: str) -> None:
    console = Console()
    console.say(text)
    with console.progress(text, 1) as advance:
        advance(1, text)
    shown = capsys.readouterr().err
    assert [sign for sign in shown if not sign.isprintable() and sign != "\n"] == []
    assert all(line.isprintable() for line in console.lines)
    assert console.lines[0] == text.encode("unicode_escape").decode()


def test_letters_of_every_script_are_shown_as_they_are() -> None:
    text = "Ärger, 図, عربى, 9\u202fAM, \N{FAMILY}\u200d\N{GIRL}\nnext"
    assert printable(text) == text
