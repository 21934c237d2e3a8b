"""`vitlab study list`, and the group of the other verbs of studies, which are rows of `verbs.py`."""

import typer

from vitlab.cli.options import Debug, Json, Verb, show

app = typer.Typer(
    name="study",
    help="Run the paper's claims again, and show its tables with our own numbers beside them.",
    no_args_is_help=True,
)


@app.command("list", cls=Verb, epilog="Example: [bold]vitlab study list[/bold]")
def show_list(as_json: Json = False, debug: Debug = False) -> None:
    """The studies that can be run, and the published tables that vitlab has as data."""
    from vitlab.studies.listing import list_studies

    rows = list_studies()
    width = max(len(row.name) for row in rows) + 2
    lines: list[str] = []
    for kind, head in (("study", "scales"), ("table", "versions")):
        lines += ["", f"{kind:<{width}}{'cells':>5}  {head:<20}title"]
        lines += [
            f"{row.name:<{width}}{row.cells:>5}  {', '.join(row.versions):<20}{row.title}"
            for row in rows
            if row.kind == kind
        ]
    show([row.__dict__ for row in rows], lines[1:], as_json=as_json)  # without the empty line before the first table
