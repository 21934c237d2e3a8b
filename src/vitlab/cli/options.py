"""The options that every verb shares, spelled once."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from vitlab.core.errors import UsageError, printable

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback when something fails.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto for the best one present.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same bits on the same machine.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; another number can change the last bits.")]
BatchSize = Annotated[int, typer.Option(metavar="N", help="Images at a time; can change the last bits.")]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Processes that load images; default one per core.")]
Part = Annotated[str | None, typer.Option(metavar="PART", help="test, val, train or all; default the first there is.")]
Force = Annotated[bool, typer.Option("--force", help="Go on with a head of zeros.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one config key; repeatable.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would happen, do nothing.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved config as TOML and exit.")]


def echo(text: str, *, end: str = "\n") -> None:
    """Prints a result. The only way to standard output besides `print_json`, whose text is ASCII by itself."""
    typer.echo(printable(text) + end, nl=False)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def show(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result: a dataclass or table as JSON, or else its lines for people."""
    if as_json:
        print_json(result if isinstance(result, dict | list) else dataclasses.asdict(result))
        return
    for line in lines:
        echo(line)


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """`224` or `224,320` (height, width)."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise UsageError(f"'{text}' is not an image size", hint="Write 224, or 224,320 for height and width.")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def parse_numbers(text: str | None, option: str) -> tuple[int, ...]:
    """`1,5,10`; nothing is none."""
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers separated by commas, not '{text}'") from None
