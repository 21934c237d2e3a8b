"""Which of our records answers which cell of a published table."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core.errors import UnknownName
from vitlab.data.sources.named import find_named
from vitlab.data.sources.vtab import VTAB
from vitlab.evaluation.published import Cell, Pretraining, PublishedTable
from vitlab.evaluation.records import Record, part_to_test
from vitlab.models.cost import count_params
from vitlab.models.names import parse_name
from vitlab.studies.cost import count_exaflops

_FIELDS = ("model", "pretrained_on", "data", "measure")  # of a record; other keys of a claim are in its settings
# Columns about how something was done, not how good it is; and what only the authors can have measured.
_NOT_MEASURED = {
    "epochs",
    "augmentation",
    "weight-decay",
    "dropout",
    "layers",
    "width",
    "mlp-size",
    "heads",
    "tpuv3-core-days",
}
_VTAB = "vtab:"


@dataclasses.dataclass(frozen=True)
class ComparedCell:
    """A cell: what each version of the paper prints, what we have, and how it came."""

    row: str
    column: str
    paper: Mapping[str, str]
    ours: str
    setting: str
    record: Record | None

    def to_dict(self) -> dict[str, Any]:
        kept = None if self.record is None else {**dataclasses.asdict(self.record), "value": self.record.value}
        return {**dataclasses.asdict(dataclasses.replace(self, record=None)), "record": kept}


def compare_cells(versions: Sequence[PublishedTable], records: Sequence[Record]) -> list[ComparedCell]:
    """Model by model; what only an older version has comes last."""
    cells: dict[tuple[str, ...], ComparedCell] = {}
    for table in versions:
        claims = list(table.claims())
        if any("model" in column.about for column in table.columns):
            claims.sort(key=lambda claim: table.columns.index(claim[1]))  # stable, so the rows keep their order
        for row, column, cell in claims:
            about = table.about(row, column)
            if "measure" not in about or about["measure"] in _NOT_MEASURED:
                continue
            key = tuple(f"{name}={about[name]}" for name in sorted(about))
            known = cells.get(key)
            if known is not None:
                cells[key] = dataclasses.replace(known, paper={**known.paper, table.version: cell.text})
            else:
                epochs = f", {about['pretrain_epochs']} epochs" if "pretrain_epochs" in row.about else ""
                ours = _ours(about, table, cell, records)
                cells[key] = ComparedCell(row.title + epochs, column.title, {table.version: cell.text}, *ours)
    return list(cells.values())


def _ours(
    about: Mapping[str, Any], table: PublishedTable, cell: Cell, records: Sequence[Record]
) -> tuple[str, str, Record | None]:
    if about["measure"] in ("exaflops", "params"):
        return _counted(about), "counted, not measured", None
    fitting = [record for record in records if answers(record, about)]
    if not fitting:
        return "", "", None
    newest = max(fitting, key=lambda record: record.date)
    others = f", newest of {len(fitting)}" if len(fitting) > 1 else ""
    return _written(newest, table, cell), _setting(newest) + others, newest


def _counted(about: Mapping[str, Any]) -> str:
    if about["measure"] == "params":
        return f"{count_params(parse_name(about['model'])) / 1e6:.1f}M"
    return rounded(count_exaflops(Pretraining(about["model"], about["pretrained_on"], about["pretrain_epochs"])))


def answers(record: Record, about: Mapping[str, Any]) -> bool:
    """Whether a record measures what a cell is about."""
    for key, wanted in about.items():
        given = getattr(record, key) if key in _FIELDS else record.settings.get(key)
        if key == "data":
            given = _one_name(str(given))
        if given != wanted:
            return False
    return record.part == part_to_test(str(about.get("data", "")))


@functools.cache
def _one_name(data: str) -> str:
    """One name per set: `pets` is `oxford-pets`, `vtab:svhn/800` is `vtab:svhn`."""
    if data.startswith(_VTAB):
        return _VTAB + _one_name(data.removeprefix(_VTAB).partition("/")[0])
    try:
        return find_named(data).name
    except UnknownName:
        return data


def _official(data: str) -> int | None:
    """How many images the whole part to test on has, where that is known."""
    name = _one_name(data)
    if name.startswith(_VTAB):
        task = VTAB.get(name.removeprefix(_VTAB))
        return None if task is None else task.test_images
    try:
        return find_named(name).parts.get(part_to_test(name))
    except UnknownName:
        return None


def _written(record: Record, table: PublishedTable, cell: Cell) -> str:
    """With as many digits as the cell beside it."""
    digits = max(1, len(cell.text.split(" ")[0].partition(".")[2].rstrip("*kM"))) if cell.values else 2
    scale = 100 if table.unit == "per cent" and record.measure != "images-per-second" else 1
    value = f"{scale * record.value:.{digits}f}"
    if record.spread is not None:
        return f"{value} ± {scale * record.spread:.{digits}f}"
    if record.interval is not None:
        low, high = (f"{scale * bound:.{digits}f}" for bound in record.interval)
        return f"{value} ({low} to {high})"
    return value


def _setting(record: Record) -> str:
    """What a reader must know before comparing: recipe, size, seeds, images."""
    size = record.settings.get("image_size", record.settings.get("preprocess", {}).get("image_size"))
    side = size[0] if isinstance(size, list) and len(set(size)) == 1 else size
    total = _official(record.data)
    words = [
        record.recipe,
        f"{side} px" if side else "",
        f"{len(record.values)} seeds" if len(record.values) > 1 else "",
        f"{record.n:,} of {total:,} images" if total not in (None, record.n) else "",
        str(record.hardware.get("name", "")),
        record.date[:10],
    ]
    return ", ".join(filter(None, words))


def rounded(number: float | None) -> str:
    """Three digits are more than such a count can promise."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
