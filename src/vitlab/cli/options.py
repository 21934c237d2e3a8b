"""From an options class to a command of typer, and the ways to standard output."""

import dataclasses
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import rich.console
import typer
from typer.core import TyperCommand

from vitlab.core.errors import printable
from vitlab.core.launch import read_launch
from vitlab.options.option import Declared, declared

Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document on standard output, and nothing else there.", rich_help_panel="Output"
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback when something fails.", rich_help_panel="Output")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved config as TOML and exit.")]

_LEAST_ROOM = 20  # characters for the second of two columns

# What others call these options. Typer itself finds what is only mistyped.
_FOREIGN = {
    "--init": ("--weights", "--pretrained", "--checkpoint", "--ckpt", "--initial-checkpoint", "--from", "--finetune"),
    "--lr": ("--learning-rate", "--lr0", "--base-lr"),
    "--epochs": ("--num-epochs", "--num-train-epochs", "-e"),
    "--batch-size": ("--batch", "--bs", "-b", "--per-device-train-batch-size", "--train-batch-size"),
    "--image-size": ("--imgsz", "--img-size", "--input-size", "--img", "--resolution", "--size"),
    "--model": ("--arch", "--architecture", "--backbone", "--net", "--model-name", "--model-name-or-path"),
    "--out": ("--output", "--output-dir", "--outdir", "--project", "--save-dir", "--save", "-o", "--name"),
    "--workers": ("--num-workers", "-j"),
    "--set data.workers=N": ("--num-workers", "--workers", "-j", "--dataloader-num-workers"),
    "--top": ("--topk", "--top-k", "-k"),
    "--device": ("--gpu", "--cuda", "--accelerator"),
    "--set optim.weight_decay=X": ("--weight-decay", "--wd"),
    "--set optim.name=NAME": ("--opt", "--optimizer", "--optim"),
    "--set train.ema=X": ("--ema", "--model-ema", "--ema-decay"),
    "--set train.precision=bf16": ("--amp", "--fp16", "--bf16", "--half", "--precision"),
    "--set train.patience=N": ("--patience", "--early-stopping"),
    "--set objective.label_smoothing=X": ("--smoothing", "--label-smoothing"),
    "DATA, without a flag": ("--data", "--data-dir", "--dataset", "--dataset-name", "--train-dir", "--source"),
    "MODEL, without a flag": ("--model", "--weights", "--checkpoint", "--model-name-or-path"),
    "IMAGES, without a flag": ("--source", "--images", "--input", "--img"),
}


class Verb(TyperCommand):
    """A command that knows what others call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            given = getattr(error, "option_name", None)
            ours = [name for name, theirs in _FOREIGN.items() if given in theirs]
            known = {flag for parameter in self.params for flag in (*parameter.opts, parameter.metavar)}
            if usable := [name for name in ours if name.split()[0].rstrip(",") in known]:
                vars(error)["possibilities"] = usable
            raise


def is_wrong_call(error: Exception) -> bool:
    """Whether typer refused the call. Its exceptions have had several homes, so they are known by what they can do."""
    return hasattr(error, "format_message") and hasattr(error, "ctx")


def wrong_call(error: Any) -> str:
    """What typer says of a wrong call, in the form of all our errors; nothing where it has shown the help."""
    if not error.format_message():
        return ""
    near: Sequence[str] | None = getattr(error, "possibilities", None)
    what = f"no such option: {error.option_name}" if near else str(error.format_message()).rstrip(".")
    what = (what[:1].lower() + what[1:]).replace("got unexpected extra argument(s)", "too many arguments:")
    guess = f". Did you mean {' or '.join(near)}?" if near else ""
    command = error.ctx.command_path if error.ctx else "vitlab"
    return f"{what}{guess}\nSee `{command.replace('python -m ', '')} -h`."


def verb(options: type, **more: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give `run(as_json, debug, **given)` an argument or a flag for each option, by the name of the Python function's.

    `more` are options of the command line alone.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        kinds = {each.name: _annotation(each) for each in declared(options)} | more | {"as_json": Json, "debug": Debug}
        defaults = {each.name: _default(each) for each in declared(options)}
        vars(run)["__signature__"] = inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=defaults.get(name, False)
                )
                for name, kind in kinds.items()
            ]
        )
        run.__annotations__ = kinds
        return run

    return decorate


def _default(option: Declared) -> Any:
    if option.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    return [] if option.takes_several else option.default


def _annotation(option: Declared) -> Any:
    """The type and the words that typer makes a parameter from."""
    opt = option.opt
    kind: Any = option.kind if option.kind in (bool, int, float) and opt.parse is None else str
    if option.takes_several:
        kind = list[str]
    elif option.default is None:
        kind = kind | None
    words: Any = {"metavar": opt.metavar, "help": opt.help, "rich_help_panel": opt.panel}
    if option.kind is bool:
        words["metavar"] = ""
    words |= {} if opt.parse is None else {"callback": read_by(opt.parse)}
    if option.argument:
        return Annotated[kind, typer.Argument(**words)]
    flag = f"--{option.flag}"
    if option.kind is bool and option.default is not False:
        flag = f"{flag}/--no-{option.flag}"
    return Annotated[kind, typer.Option(flag, *([opt.short] if opt.short else []), **words)]


def read_by(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """`parse` as a callback for typer, whose own parsers would wrap our errors in theirs."""
    return lambda value: None if value is None else parse(value)


def echo(text: str, *, end: str = "\n", bold: bool = False) -> None:
    """Prints a result. The only way to standard output besides `print_json`, whose text is ASCII by itself."""
    typer.secho(printable(text) + end, nl=False, bold=bold or None)  # on a terminal only


def terminal_width() -> int | None:
    """Columns of the terminal that is written to; None where it is a file or a pipe, whose lines stay whole."""
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdigit() and not sys.stdout.isatty():
        return None
    return rich.console.Console().width


def two_columns(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Names beside texts, all texts below each other; one that is longer than the terminal wraps below itself."""
    left = max(len(name) for name, _ in rows) + 2
    lines = list[str]()
    for name, text in rows:
        # A command to be pasted is not torn at its hyphens, and where hardly a word fits beside the names, nothing is.
        room = None if width is None or width < left + _LEAST_ROOM else width - left
        parts = [text] if room is None else textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        lines += [f"{'' if i else name:<{left}}{part}" for i, part in enumerate(parts or [""])]
    return lines


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def show(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: a table, a dataclass or what has `to_json` as JSON, or else its lines for people.

    Of several processes, the first does.
    """
    if read_launch().rank:
        return
    if as_json:
        print_json(_to_json(result))
        return
    for number, line in enumerate(lines):
        echo(line, bold=number == 0)


def _to_json(result: Any) -> Any:
    if isinstance(result, dict | list):
        return result
    return result.to_json() if hasattr(result, "to_json") else dataclasses.asdict(result)
