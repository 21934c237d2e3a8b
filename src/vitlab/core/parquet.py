"""Tables as parquet, written piece by piece, so that a table larger than memory can be written. Needs the extra `parquet`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlab.core.errors import MissingExtra
from vitlab.core.stream_buffer import StreamBuffer

Column = Sequence[Any] | np.ndarray[Any, Any]  # two dimensions are a list of numbers in every row


def require_parquet() -> None:
    """An error, before any work, where parquet cannot be written."""
    try:
        import pyarrow.parquet  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "writing parquet") from None


def parquet_chunks(tables: Iterable[Mapping[str, Column]]) -> Iterator[bytes]:
    """The bytes of one parquet file with the rows of all tables, which have the same columns."""
    require_parquet()
    import pyarrow
    from pyarrow import parquet

    file, writer = StreamBuffer(), None
    for columns in tables:
        arrays = {name: _array(pyarrow, column) for name, column in columns.items()}
        table = pyarrow.table(arrays)
        if writer is None:
            writer = parquet.ParquetWriter(pyarrow.PythonFile(file, mode="w"), table.schema)
        writer.write_table(table)
        yield file.take()
    if writer is not None:
        writer.close()
    yield file.take()


def _array(pyarrow: Any, column: Column) -> Any:
    if not isinstance(column, np.ndarray):
        return pyarrow.array([_utf8(value) if isinstance(value, str) else value for value in column])
    if column.ndim == 1:
        return pyarrow.array(column)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1)), column.shape[1])


def _utf8(text: str) -> str:
    """Parquet holds UTF-8 only, and a file name may have any bytes: invalid ones become \\xff."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
