"""The options of `data check`, `data split` and `data shard`."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import Columns, Device, DryRun, Opt, Quiet, Seed, StrPath

Data = Annotated[StrPath, Opt("A folder of class folders, a table, shards, or a name.", metavar="DATA")]
Workers = Annotated[int | None, Opt("Processes; default one per core, eight at most.", metavar="N")]


@dataclass(frozen=True)
class CheckOptions:
    data: Data
    _: KW_ONLY
    columns: Columns = None
    against: Annotated[StrPath | None, Opt("Other data whose test images must not be among these.", metavar="DATA")] = (
        None
    )
    model: Annotated[
        StrPath | None, Opt("Also compare labels with the nearest pictures' by this model.", metavar="MODEL")
    ] = None
    out: Annotated[
        StrPath | None, Opt("A new folder for audit.html, with pictures, and audit.json.", metavar="DIR")
    ] = None
    workers: Workers = None
    device: Device = "auto"
    quiet: Quiet = False


@dataclass(frozen=True)
class SplitOptions:
    data: Data
    out: Annotated[StrPath, Opt("The table to write; it names the images.", metavar="FILE.csv", named=True)]
    _: KW_ONLY
    columns: Columns = None
    train: Annotated[float, Opt("Share of every class.", metavar="P")] = 0.8
    val: Annotated[float, Opt("Share of every class; 0 for no such part.", metavar="P")] = 0.1
    test: Annotated[float, Opt("Share of every class; 0 for no such part.", metavar="P")] = 0.1
    seed: Seed = 0
    group_by: Annotated[
        str | None, Opt("Keep together what has this in its name in common: 'patient\\d+'.", metavar="REGEX")
    ] = None
    dry_run: DryRun = False
    quiet: Quiet = False


@dataclass(frozen=True)
class ShardOptions:
    data: Data
    out: Annotated[StrPath, Opt("The folder for the shards.", metavar="OUT")]
    _: KW_ONLY
    columns: Columns = None
    per_shard: Annotated[int, Opt("Images in a shard; it is held in memory while it is written.", metavar="N")] = 1000
    workers: Workers = None
    dry_run: DryRun = False
    quiet: Quiet = False
