"""`vitlab study list | report`."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Json, Verb, show

app = typer.Typer(
    name="study", help="Show the published tables, with our own numbers beside them.", no_args_is_help=True
)


@app.command("list", cls=Verb, epilog="Example: [bold]vitlab study list[/bold]")
def show_list(as_json: Json = False, debug: Debug = False) -> None:
    """The published tables that vitlab has as data."""
    from vitlab.studies.listing import list_studies

    rows = list_studies()
    width = max(len(row.name) for row in rows) + 2
    lines = [f"{row.name:<{width}}{row.cells:>5}  {', '.join(row.versions):<10}{row.title}" for row in rows]
    head = f"{'table':<{width}}{'cells':>5}  {'versions':<10}title"
    show([row.__dict__ for row in rows], [head, *lines], as_json=as_json)


@app.command("report", cls=Verb, epilog="Example: [bold]vitlab study report table2[/bold]")
def report(
    table: Annotated[str, typer.Argument(help="A name from `vitlab study list`, such as table2.")],
    records: Annotated[
        Path | None, typer.Option(help="The folder of our records; docs/results/records by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new .md or .html file to write it to.")] = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(help="Sustained TFLOP/s of a GPU to count training days with.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """One published table as printed, with our numbers beside it, and what the training costs."""
    from vitlab.studies.tables import report_study

    study = report_study(table, records=records, out=out, gpu_tflops=gpu_tflops)
    text = study.text() if study.out is None else f"{study.measured()}\nWritten to {study.out}."
    show(study.to_json(), [text], as_json=as_json)
