"""`vitlab study list`: the published tables that vitlab has as data. Loads no torch."""

import dataclasses

from vitlab.evaluation.published import published_tables


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """One line of `vitlab study list`."""

    name: str
    title: str
    versions: tuple[str, ...]
    cells: int
    source: str


def list_studies() -> list[StudyRow]:
    """The published tables that vitlab has as data."""
    return [
        StudyRow(
            name=name,
            title=versions[0].title,
            versions=tuple(table.version for table in versions),
            cells=sum(len(row.cells) for row in versions[0].rows),
            source=versions[0].source,
        )
        for name, versions in published_tables().items()
    ]
