"""`vitlab data list` and `check`, and the group of the other verbs of data, which are rows of `verbs.py`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli.options import Debug, Json, Verb, echo, print_json, verb
from vitlab.core.errors import UnknownName, VitlabError, amount
from vitlab.options.data_options import CheckOptions

app = typer.Typer(name="data", help="List, check, split and shard data sets.", no_args_is_help=True)

_SHOWN = 5  # findings of a kind; --out and --json have all


@app.command("list", cls=Verb, epilog="Example: [bold]vitlab data list 'cifar*'[/bold]")
def show_list(
    pattern: Annotated[str, typer.Argument(help="A shell pattern, such as 'cifar*'.")] = "*",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The sets that have a name: which are here, which can be fetched or generated, and where to put the others."""
    from vitlab.data.sources.named import list_data

    rows = list_data(pattern)
    if not rows:
        raise UnknownName("data set", pattern, [row.name for row in list_data()], hint="`vitlab data list` lists all.")
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    echo(f"{'name':<22}{'classes':>8}  {'images':<40}{'state':<10}where")
    for row in rows:
        parts = ", ".join(f"{part} {count:,}" for part, count in row.parts.items()) or "-"
        echo(f"{row.name:<22}{row.classes:>8,}  {parts:<40}{row.state:<10}{row.where}")
        if row.state == "by hand":
            echo(f"{'':<22}{'':>8}  put there: {', '.join(row.files) or row.where}")


@app.command("check", cls=Verb, epilog="Example: [bold]vitlab data check photos --out audit[/bold]")
@verb(CheckOptions)
def check(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Decode every image; find what is broken, odd, there twice, or in two parts. Exits with status 1 if it is serious."""
    from vitlab.data.auditing.audit import SERIOUS, TITLES
    from vitlab.runs.data_tools import audit_json, check_data

    audit, out = check_data(**given), given["out"]
    if as_json:
        print_json(audit_json(audit))
    else:
        for part, counts in audit.parts.items():
            present = sum(count > 0 for count in counts.values())
            echo(f"{part:<8} {audit.sizes[part]:,} images of {present:,} classes")
        formats = ", ".join(f"{name} {count:,}" for name, count in audit.formats.items())
        echo(f"{'files':<8} {formats}; {audit.megabytes:,.1f} MB; median shorter side {audit.median_side} pixels")
        for note in audit.notes:
            echo(f"{'note':<8} {note}")
        for kind, count in audit.counts.items():
            echo(f"\n{'!!' if kind in SERIOUS else '--'}  {TITLES[kind]}: {count:,}")
            for finding in [finding for finding in audit.findings if finding.kind == kind][:_SHOWN]:
                names = ", ".join(item.key for item in finding.items[:_SHOWN])
                echo(f"      {names}{': ' if names else ''}{finding.text}")
            if count > _SHOWN:
                echo(f"      and {count - _SHOWN:,} more; --out DIR or --json gives all")
        if not audit.findings:
            echo("\nnothing to report")
        if out is not None:
            echo(f"\npage: {Path(out) / 'audit.html'}")
    if audit.serious:
        number = sum(finding.serious for finding in audit.findings)
        raise VitlabError(f"{amount(number, 'serious finding')} in {given['data']}", hint="They are marked !! above.")
