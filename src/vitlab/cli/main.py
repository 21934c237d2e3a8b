"""The `vitlab` command: verbs, exit codes, and errors as a few helpful lines.

Owns nothing but the way in and the way out. Each verb is one public function with the same options; its module is imported
when the verb runs, so that `vitlab --help` never waits for torch.
"""

import contextlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from vitlab.cli import (
    compare_verb,
    convert_verb,
    data_verb,
    demo_verb,
    doctor_verb,
    embed_verb,
    evaluate_verb,
    models_verb,
    plan_verb,
    predict_verb,
    recipes_verb,
    study_verb,
    train_verb,
)
from vitlab.cli.options import echo
from vitlab.core.errors import VitlabError, printable
from vitlab.core.launch import read_launch
from vitlab.core.signals import Stopped

app = typer.Typer(
    name="vitlab",
    help="The Vision Transformer paper as software: models, training, transfer, inspection.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import vitlab

        echo(f"vitlab {vitlab.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The Vision Transformer paper as software: models, training, transfer, inspection."""


app.command("compare")(compare_verb.run)
app.command("convert")(convert_verb.run)
app.command("demo")(demo_verb.run)
app.command("doctor")(doctor_verb.run)
app.command("embed")(embed_verb.run)
app.command("evaluate")(evaluate_verb.run)
app.command("plan")(plan_verb.run)
app.command("predict")(predict_verb.run)
app.command("train")(train_verb.run)
app.add_typer(data_verb.app, name="data")
app.add_typer(models_verb.app, name="models")
app.add_typer(recipes_verb.app, name="recipes")
app.add_typer(study_verb.app, name="study")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    if _imports(frame):
        # A library that is half imported swallows what is raised in it, fails the next time, or aborts. At the start nothing
        # is at work yet; at the end, where figures load theirs, all that a run has learnt is on the disk.
        _report(Stopped(number))
        os._exit(128 + number)
    raise Stopped(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _report(stopped: Stopped) -> None:
    if not read_launch().rank:  # of several processes, the first speaks for all
        _print(f"\nvitlab: stopped{stopped.reason}. {stopped.advice}".rstrip(" ."))


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong call, 130 and 143 by a signal."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)  # typer would end in silence on Ctrl-C
    code = _run("--debug" in sys.argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # while Python shuts down, nobody would catch ours
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)


def _drop_output() -> None:
    """Discard what could not be written: Python would fail on its buffer once more."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(debug: bool) -> int:
    try:
        app()
    except SystemExit as leave:
        if isinstance(leave.__context__, BrokenPipeError):  # the reader of our output left, as `| head` does
            _drop_output()
            return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
        return leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except VitlabError as error:
        if debug:
            _print(traceback.format_exc().rstrip())
        _print(f"vitlab: {error}")
        return error.exit_code
    except OSError as error:  # standard output itself failed: a full disk behind a redirection
        _print(f"vitlab: cannot write the output: {error.strerror or error}")
        _drop_output()
        return 1
    except Stopped as stopped:
        _report(stopped)
        return stopped.exit_code
    except Exception as error:
        if debug:
            _print(traceback.format_exc().rstrip())
        _print(f"vitlab: unexpected {type(error).__name__}: {error}")
        _print("This is a fault in vitlab. Run it again with --debug and report what it prints.")
        return 1
    return 0
