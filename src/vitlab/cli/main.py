"""The `vitlab` command: verbs, exit codes, and errors as a few helpful lines.

Owns nothing but the way in and the way out. `verbs.py` has the verbs that call one public function and print its result; those
that print tables of their own have a file each.
"""

import contextlib
import gc
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from vitlab.cli import data_verb, doctor_verb, models_verb, recipes_verb, study_verb, verbs
from vitlab.cli.options import Verb, echo, is_wrong_call, wrong_call
from vitlab.core.errors import VitlabError, printable, shortened
from vitlab.core.launch import read_launch
from vitlab.core.signals import Stopped

app = typer.Typer(
    name="vitlab",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]vitlab demo[/bold], or with your own photos: [bold]vitlab train PHOTOS[/bold].",
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
    """Train, test, explain and share Vision Transformers: from a folder of photos, or by the paper's own recipes."""


verbs.add_verbs(app, {"study": study_verb.app, "data": data_verb.app})
app.command("doctor", cls=Verb, rich_help_panel=verbs.ABOUT, epilog="Example: [bold]vitlab doctor[/bold]")(
    doctor_verb.run
)
app.add_typer(study_verb.app, name="study", rich_help_panel=verbs.JUDGE)
app.add_typer(data_verb.app, name="data", rich_help_panel=verbs.DATA)
app.add_typer(models_verb.app, name="models", rich_help_panel=verbs.WEIGHTS)
app.add_typer(recipes_verb.app, name="recipes", rich_help_panel=verbs.ABOUT)


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
    text = printable(text)
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and text.startswith("vitlab: "):
        text = f"\033[1;31mvitlab:\033[0m {text.removeprefix('vitlab: ')}"
    print(text, file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong call, 130 and 143 by a signal."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)  # typer would end in silence on Ctrl-C
    if "--version" in sys.argv[1:]:  # of any verb
        sys.argv[1:] = ["--version"]
    code = _run("--debug" in sys.argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # while Python shuts down, nobody would catch ours
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # the last collection would walk through all that torch has loaded, which takes half a second
    sys.exit(code)


def _drop_output() -> None:
    """Discard what could not be written: Python would fail on its buffer once more."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(debug: bool) -> int:
    try:
        code = app(standalone_mode=False)
        return code if isinstance(code, int) else 0
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
    except OSError as error:
        if debug:
            _print(traceback.format_exc().rstrip())
        if error.filename is not None:  # a path that the system refuses, such as a name that is too long
            _print(f"vitlab: {shortened(str(error.filename))}: {(error.strerror or str(error)).lower()}")
            return 1
        # Standard output itself failed: a full disk behind a redirection.
        _print(f"vitlab: cannot write the output: {error.strerror or error}")
        _drop_output()
        return 1
    except Stopped as stopped:
        _report(stopped)
        return stopped.exit_code
    except Exception as error:
        if is_wrong_call(error):
            if message := wrong_call(error):
                _print(f"vitlab: {message}")
            return 2
        if debug:
            _print(traceback.format_exc().rstrip())
        _print(f"vitlab: unexpected {type(error).__name__}: {error}")
        _print("This is a fault in vitlab. Run it again with --debug and report what it prints.")
        return 1
