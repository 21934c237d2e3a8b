"""`vitlab data shard`: any data as tar shards, with an index and checksums."""

import dataclasses
from pathlib import Path

from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.data.processes import usual_number
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.shard_writing import write_shards


@dataclasses.dataclass(frozen=True)
class Sharded:
    out: Path
    images: int
    shards: int
    megabytes: float


def shard_data(
    data: str | Path, out: str | Path, *, per_shard: int = 1000, workers: int | None = None, quiet: bool = False
) -> Sharded:
    """Write `data` to the folder `out` as WebDataset shards of `per_shard` images.

    The same call after an interruption resumes. Files are copied as they are, synthetic images become PNG, and a file that is
    not an image stops the work with its name: what is left out of a set is for its owner to decide.
    """
    if per_shard < 1 or (workers is not None and workers < 1):
        raise UsageError("--per-shard and --workers must be at least 1")
    console = Console(quiet=quiet)
    opened = open_data(data, console=console)
    total = sum(len(part) for part in opened.parts.values())
    with console.progress("shard", total) as advance:
        table = write_shards(opened, Path(out), per_shard=per_shard, workers=usual_number(workers), advance=advance)
    size = sum(shard["bytes"] for shard in table.values())
    return Sharded(Path(out), total, len(table), round(size / 1e6, 1))
