"""The options of `data check`, `data split` and `data shard`."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from vitlab.options.option import Columns, Device, DryRun, Opt, Quiet, Seed, StrPath, opt

Data = Annotated[StrPath, Opt("A folder of class folders, a table, shards, or a name.", "DATA")]
Workers = Annotated[int | None, Opt("Processes; default one per core, eight at most.", "N")]


@dataclass(frozen=True)
class CheckOptions:
    data: Data
    _: KW_ONLY
    columns: Columns = None
    against: StrPath | None = opt(None, "Other data whose test images must not be among these.", "DATA")
    model: StrPath | None = opt(None, "Also compare labels with the nearest pictures' by this model.", "MODEL")
    out: StrPath | None = opt(None, "A new folder for audit.html, with pictures, and audit.json.", "DIR")
    workers: Workers = None
    device: Device = "auto"
    quiet: Quiet = False


@dataclass(frozen=True)
class SplitOptions:
    data: Data
    out: Annotated[StrPath, Opt("The table to write; it names the images.", "FILE.csv", named=True)]
    _: KW_ONLY
    columns: Columns = None
    train: float = opt(0.8, "Share of every class.", "P")
    val: float = opt(0.1, "Share of every class; 0 for none.", "P")
    test: float = opt(0.1, "Share of every class; 0 for none.", "P")
    seed: Seed = 0
    group_by: str | None = opt(None, "Keep together what has this in its name in common: 'patient\\d+'.", "REGEX")
    dry_run: DryRun = False
    quiet: Quiet = False


@dataclass(frozen=True)
class ShardOptions:
    data: Data
    out: Annotated[StrPath, Opt("The folder for the shards.", "OUT")]
    _: KW_ONLY
    columns: Columns = None
    per_shard: int = opt(1000, "Images in a shard; it is held in memory while it is written.", "N")
    workers: Workers = None
    dry_run: DryRun = False
    quiet: Quiet = False
