"""From an options class to a command of typer, and the ways to standard output."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

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
    words: Any = {"metavar": opt.metavar, "help": opt.help, "rich_help_panel": opt.panel, "parser": opt.parse}
    if option.argument:
        return Annotated[kind, typer.Argument(**words)]
    flag = f"--{option.flag}"
    if option.kind is bool and option.default is not False:
        flag = f"{flag}/--no-{option.flag}"
    return Annotated[kind, typer.Option(flag, *([opt.short] if opt.short else []), **words)]


def echo(text: str, *, end: str = "\n") -> None:
    """Prints a result. The only way to standard output besides `print_json`, whose text is ASCII by itself."""
    typer.echo(printable(text) + end, nl=False)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def show(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: a dataclass or table as JSON, or else its lines for people. Of several processes, the first does."""
    if read_launch().rank:
        return
    if as_json:
        print_json(result if isinstance(result, dict | list) else dataclasses.asdict(result))
        return
    for line in lines:
        echo(line)
