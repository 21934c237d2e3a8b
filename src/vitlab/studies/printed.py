"""The paper's own numbers as a plot in the layout of the study's, to stand beside it. Loads no torch."""

from collections.abc import Iterator

from vitlab.evaluation.published import Cell, PublishedTable, Row, find_table
from vitlab.report.plot import Plot, PlotPoint, PlotSeries
from vitlab.studies.study import Printed, Study


def printed_plot(study: Study) -> Plot | None:
    """The published table of a study as the paper draws it; None where the study does not say how."""
    given = study.printed
    if given is None:
        return None
    table = find_table(study.table)[0]
    lines: dict[str, list[PlotPoint]] = {name: [] for name in given.lines.values()}
    for line, point in _rows_as_points(table, given) if given.y else _rows_as_places(table, given):
        lines.setdefault(line, []).append(point)
    series = [
        PlotSeries(name, points, colour=number, joined=given.log_x and not given.y, hollow=True)
        for number, (name, points) in enumerate(lines.items())
    ]
    categories = [] if given.y or given.places else [row.title for row in table.rows]
    return Plot(
        title=f"The paper: {given.title}",
        caption=f"The paper's own numbers, from the table below: {table.title}.",
        series=series,
        x_label=given.x_label,
        y_label=given.y_label,
        log_x=given.log_x,
        percent=True,
        categories=categories,
    )


def _rows_as_places(table: PublishedTable, given: Printed) -> Iterator[tuple[str, PlotPoint]]:
    """Every column a line over the rows: over their places, or over their names where they have none."""
    for k, row in enumerate(table.rows):
        for column, cell in zip(table.columns, row.cells, strict=True):
            line = given.lines.get(column.title, column.title)
            x = given.places.get(row.title) if given.places else k
            if cell.values and x is not None:
                yield line, _point(x, cell, table, f"{line}, {row.title}", [])


def _rows_as_points(table: PublishedTable, given: Printed) -> Iterator[tuple[str, PlotPoint]]:
    """Every row a point: one column over another. It is on the line that the longest beginning of its title names."""
    titles = [column.title for column in table.columns]
    for row in table.rows:
        x, y = (row.cells[titles.index(title)] for title in (given.x, given.y))
        if x.values and y.values:
            facts = [(title, cell.text) for title, cell in zip(titles, row.cells, strict=True)]
            yield _line_of(row, given), _point(x.values[0], y, table, row.title, facts)


def _line_of(row: Row, given: Printed) -> str:
    beginnings = [text for text in given.lines if row.title.startswith(text)]
    return given.lines[max(beginnings, key=len)] if beginnings else row.title


def _point(x: float, cell: Cell, table: PublishedTable, name: str, facts: list[tuple[str, str]]) -> PlotPoint:
    scale = 0.01 if table.unit == "per cent" else 1.0
    y = scale * cell.values[0]
    interval = None if cell.spread is None else (y - scale * cell.spread, y + scale * cell.spread)
    return PlotPoint(x, y, name, interval, facts or [("printed", cell.text)])
