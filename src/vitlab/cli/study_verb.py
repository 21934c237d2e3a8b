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
    scales = ("laptop", "gpu")
    lines = [f"{'study':<{width}}{''.join(f'{scale:<9}' for scale in scales)}repeats"]
    for row in (row for row in rows if row.kind == "study"):
        took = "".join(f"{_minutes(row.minutes.get(scale)):<9}" for scale in scales)
        lines.append(f"{row.name:<{width}}{took}{row.title} ({row.source})")
    lines += ["", f"{'table':<{width}}{'cells':<9}{'version':<9}title"]
    for row in (row for row in rows if row.kind == "table"):
        lines.append(f"{row.name:<{width}}{row.cells:<9}{', '.join(row.versions):<9}{row.title}")
    show([row.__dict__ for row in rows], lines, as_json=as_json)


def _minutes(minutes: float | None) -> str:
    return "" if minutes is None else f"{minutes:g} min"
