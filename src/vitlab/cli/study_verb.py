"""`vitlab study list | show | run | report`."""

from typing import Annotated, Any

import typer

from vitlab.cli.options import Debug, Json, Verb, show, show_planned, verb
from vitlab.options.study_options import StudyReportOptions, StudyRunOptions

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
    show([row.__dict__ for row in rows], lines[1:], as_json=as_json)


@app.command("show", cls=Verb, epilog="Example: [bold]vitlab study show positions[/bold]")
def show_one(
    name: Annotated[str, typer.Argument(help="A study of `vitlab study list`, or a TOML file.", metavar="NAME")],
    scale: Annotated[str | None, typer.Option(help="laptop, gpu or paper; default: all.", metavar="SCALE")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The question of a study, its claims, and its grid at each scale."""
    from vitlab.studies.listing import show_study

    shown = show_study(name, scale)
    show(shown.to_json(), shown.sentences(), as_json=as_json)


@app.command("run", cls=Verb, epilog="Example: [bold]vitlab study run positions --scale laptop[/bold]")
@verb(StudyRunOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Run every cell that has no record yet, several at a time, and report what came out."""
    from vitlab.studies.study_run import run_study

    result = run_study(**given)
    if not show_planned(result, as_json=as_json):
        show(result.to_json(), result.sentences(), as_json=as_json)
        if result.failed:
            raise typer.Exit(1)


@app.command("report", cls=Verb, epilog="Example: [bold]vitlab study report table2[/bold]")
@verb(StudyReportOptions)
def report(*, as_json: bool, debug: bool, **given: Any) -> None:
    """A study, a published table with our numbers beside it, or with `claims` what holds of all of them."""
    from vitlab.studies.reporting import report_study

    found = report_study(**given)
    text = found.text() if found.out is None else f"{found.measured()}\nWritten to {found.out}."
    show(found.to_json(), [text], as_json=as_json)
