"""`vitlab study list | report`."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Debug, Json, echo, print_json

app = typer.Typer(name="study", help="The published tables, and our own numbers beside them.", no_args_is_help=True)


@app.command("list")
def show_list(as_json: Json = False, debug: Debug = False) -> None:
    """The published tables that vitlab has as data."""
    from vitlab.studies.tables import list_studies

    rows = list_studies()
    if as_json:
        print_json([{**row.__dict__} for row in rows])
        return
    width = max(len(row.name) for row in rows) + 2
    echo(f"{'table':<{width}}{'cells':>5}  {'versions':<10}title")
    for row in rows:
        echo(f"{row.name:<{width}}{row.cells:>5}  {', '.join(row.versions):<10}{row.title}")


@app.command("report")
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

    found = report_study(table, records=records, out=out, gpu_tflops=gpu_tflops)
    if as_json:
        print_json(found.to_json())
    else:
        echo(found.text() if found.out is None else f"{found.measured()}\nWritten to {found.out}.")
