"""The table of a study while it runs: conditions by seeds, on a terminal redrawn in place. Loads no torch."""

from collections.abc import Mapping, Sequence
from types import TracebackType

import rich.console
import rich.live
import rich.table
import rich.text

from vitlab.core.console import Console
from vitlab.core.errors import printable
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.conditions import number_of
from vitlab.studies.grid import Cell, list_cells
from vitlab.studies.study import Scale, Study
from vitlab.studies.units import is_share, percent_unit

_MORE_LINES, _BELOW = 2, 3  # a study's title and header; an empty line, the progress, and the cursor


class LiveTable:
    """Use as a context; `update` redraws it, `say` prints a line above it."""

    def __init__(self, studies: Sequence[tuple[Study, Scale]], console: Console) -> None:
        self._console, self._studies = console, studies
        self._cells = [(study, scale, list_cells(scale)) for study, scale in studies]
        self._out = rich.console.Console(stderr=True, quiet=console.quiet, highlight=False)
        self._live: rich.live.Live | None = None
        lines = sum(_MORE_LINES + len({cell.name for cell in cells}) for _, _, cells in self._cells) + _BELOW
        # What is higher than the screen cannot be redrawn in place: then lines go by, as they do in a file.
        self._drawn = self._out.is_terminal and not console.quiet and lines <= self._out.height

    def __enter__(self) -> "LiveTable":
        if self._drawn:
            self._live = rich.live.Live(console=self._out, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        if self._live is None:
            self._console.say(line)

    def update(self, records: Mapping[str, CellRecord], held: set[str], progress: str = "") -> None:
        """Draw anew; `held` are the runs that somebody is at, `progress` is a line below."""
        if self._live is not None:
            tables = [_table(study, scale, cells, records, held) for study, scale, cells in self._cells]
            below = rich.text.Text(f"\n{progress}", style="dim")
            self._live.update(rich.console.Group(*tables, below), refresh=True)


def _table(
    study: Study, scale: Scale, cells: Sequence[Cell], records: Mapping[str, CellRecord], held: set[str]
) -> rich.console.Group:
    title = rich.text.Text(printable(f"{study.title} ({scale.name})"), style="table.title")
    table = rich.table.Table(box=None)
    for axis in scale.axes:
        table.add_column(axis)
    for seed in scale.seeds:
        table.add_column(f"seed {seed}", justify="right")
    rows: dict[tuple[str, ...], dict[int, Cell]] = {}
    for cell in cells:
        rows.setdefault(tuple(cell.labels.values()), {})[cell.seed] = cell
    for labels, by_seed in rows.items():
        states = [_state(by_seed.get(seed), scale.measure, records, held) for seed in scale.seeds]
        table.add_row(*(rich.text.Text(printable(label)) for label in labels), *states)
    return rich.console.Group(title, table)  # a title of the table itself would be wrapped to its width


def _state(cell: Cell | None, measure: str, records: Mapping[str, CellRecord], held: set[str]) -> rich.text.Text:
    if cell is None:
        return rich.text.Text("")
    chain = cell.run.chain()
    if cell.run.key in records:
        value = number_of(records[cell.run.key], measure)
        share = is_share(measure)
        text = "done" if value is None else f"{100 * value:.1f} {percent_unit(measure)}" if share else f"{value:.3g}"
        return rich.text.Text(text, style="bold")
    if any(run.key in held for run in chain):
        return rich.text.Text("running", style="yellow")
    return rich.text.Text("·", style="dim")
