"""One way in for all data: a path, an address or a name -> its parts.

Owns the choice of the reader, by what lies there; each reader owns its format.
"""

from pathlib import Path

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UnknownName
from vitlab.data import drawn, folders, named, packed, shards, tables
from vitlab.data.dataset import Opened


def open_data(where: str | Path, *, console: Console | None = None) -> Opened:
    """The data in a folder of class folders, a table, tar shards, a packed archive, or a set known by name, stored or drawn."""
    text, path = str(where), Path(where)
    if shards.is_remote(text):
        return shards.open_shards(text)
    if path.is_dir():
        return shards.open_shards(path) if any(path.glob("*.tar")) else folders.open_folder(path)
    if path.is_file():
        return _open_file(path)
    if drawn.is_drawn(text):
        return drawn.open_drawn(text)
    try:
        return named.open_named(text, console=console)
    except UnknownName as error:
        if "/" not in text and not path.suffix:
            raise
        raise FileProblem(f"{where} does not exist") from error


def _open_file(path: Path) -> Opened:
    if path.suffix.lower() in tables.SUFFIXES:
        return tables.open_table(path)
    if path.suffix.lower() == ".tar":
        return shards.open_shards(path)
    if path.suffix.lower() == ".npz":
        return packed.open_packed({"all": path})
    raise FileProblem(
        f"{path} is no data set that vitlab knows",
        hint="Give a folder of class folders, a .csv, .parquet, .tar or packed .npz, or the name of a data set.",
    )
