"""`vitlab data check`, `vitlab data split` and `vitlab data shard`."""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.data.auditing.audit import Audit, Item, audit, label_of, scan_parts
from vitlab.data.dataset import Dataset, train_part
from vitlab.data.part_names import test_part
from vitlab.data.processes import num_workers
from vitlab.data.sources.folders import FileReader
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.shard_writing import write_shards
from vitlab.data.splits import copies_in, split_shares, split_table
from vitlab.engines.classifier import load
from vitlab.options.data_options import CheckOptions, ShardOptions, SplitOptions
from vitlab.options.option import takes
from vitlab.report.data_page import render_audit


@dataclasses.dataclass(frozen=True)
class Split:
    """Where the table lies, and how many images, and of each class, are in each part."""

    out: Path
    sizes: Mapping[str, int]  # images by part
    counts: Mapping[str, Mapping[str, int]]  # images of each class, by part
    groups: int | None  # how many, or None
    copies: int  # pictures that are there more than once
    copies_apart: int  # of these, in two parts even so: their class has too few pictures to keep them together

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        lines = [
            f"{part:<8} {self.sizes[part]:,} images of {len(counts):,} classes" for part, counts in self.counts.items()
        ]
        if self.groups is not None:
            lines.append(f"{'groups':<8} {self.groups:,}, none of them in two parts")
        if self.copies:
            apart = f"{self.copies_apart:,} of them" if self.copies_apart else "none of them"
            lines.append(f"{'copies':<8} pictures more than once: {self.copies:,}, {apart} in two parts")
        return [*lines, f"{'table':<8} {self.out}"]


@takes(CheckOptions)
def check_data(options: CheckOptions) -> Audit:
    """Decode every image and report what is broken, odd, duplicate or leaked.

    `against` is other data whose test images must not be among these; `model` also compares labels with those of the
    nearest pictures. With `out`, a new folder, the findings are stored there as `audit.json` and as the page `audit.html`.
    """
    data, against, model, workers = options.data, options.against, options.model, options.workers
    if workers is not None and workers < 1:
        raise UsageError(f"--workers must be at least 1, not {workers}")
    console = Console(quiet=options.quiet)
    folder = None if options.out is None else fsio.require_free(Path(options.out))
    opened = open_data(data, columns=options.columns, console=console)
    others: dict[str, Dataset] = {}
    if against is not None:
        held_out = open_data(against, console=console)
        name = test_part(held_out.parts) or train_part(held_out.parts)
        others = {f"{against} ({name})": held_out.parts[name]}
    classifier = None if model is None else load(model, device=options.device, quiet=options.quiet)
    embed = None if classifier is None else classifier.embed
    result = audit(opened, against=others, embed=embed, workers=workers, console=console)
    if folder is not None:
        sources = {**opened.parts, **others}

        def read(item: Item) -> Any:
            return sources[item.part].read(item.index)

        with fsio.new_folder(folder) as new:
            new.write_json("audit.json", audit_json(result))
            new.write("audit.html", render_audit(result, str(data), read))
    return result


def audit_json(result: Audit) -> dict[str, Any]:
    """The audit as it is stored and printed."""
    head = {"images": result.images, "serious": result.serious, "counts": result.counts}
    return head | dataclasses.asdict(result)


@takes(SplitOptions)
def split_data(options: SplitOptions) -> Split:
    """Write a table `path,label,split` of a stratified split.

    The same data and seed give the same table. Two or three of train, val and test have a share. Copies of a picture, for which
    every image is decoded, stay together. So do groups: those of the data, or what the regular expression `group_by` finds in
    each name, as `patient\\d+`; where it has a group in parentheses, that one.
    """
    data, seed = options.data, options.seed
    parts = {name: share for name in ("train", "val", "test") if (share := getattr(options, name)) != 0}
    table = fsio.require_free(Path(options.out))
    if table.suffix.lower() != ".csv":
        raise UsageError(f"the split is a table: {table} should end in .csv")
    opened = open_data(data, columns=options.columns)
    if list(opened.parts) != ["all"]:
        what = f"{data} is split already: {', '.join(opened.parts)}"
        raise UsageError(what, hint="Give one of its parts, as a folder of its own, to split that.")
    dataset = opened.parts["all"]
    if not isinstance(dataset.read, FileReader):
        raise UsageError(f"{data} is not a folder of files, so that a table cannot name its images")
    if odd := [name for name in dataset.classes if ";" in name or name != name.strip()]:
        raise UsageError(f"the class '{odd[0]}' cannot stand in a table: ';' separates labels there")
    groups = dataset.groups if options.group_by is None else _groups(dataset.keys, options.group_by)
    planned = split_shares(dataset, parts, seed, groups)  # a wrong call fails before every image is decoded
    stop_if_dry_run(
        options.dry_run,
        {
            "data": f"{data}: {counted(len(dataset), len(dataset.classes))}",
            "parts": ", ".join(f"{part} {planned.count(part):,}" for part in parts)
            + ", before copies are brought together",
            "out": table,
        },
    )
    scanned = scan_parts(opened.parts, workers=None, console=Console(quiet=options.quiet))
    copies = copies_in(dataset, scanned.copies("all"))
    split = split_shares(dataset, parts, seed, groups, copies)
    fsio.make_folder(table.parent)
    paths = _paths_from(table.parent, dataset.read.root, dataset.keys)
    labels = [label_of(dataset, i) for i in range(len(dataset))]
    fsio.write_file(table, split_table(paths, labels, split, groups))
    counts = {part: Counter[str]() for part in parts}
    for part, label in zip(split, labels, strict=True):
        counts[part].update(filter(None, label.split(";")))
    return Split(
        table,
        {part: split.count(part) for part in parts},
        {part: dict(sorted(count.items())) for part, count in counts.items()},
        len(set(groups)) if groups else None,
        len(copies),
        sum(len({split[i] for i in images}) > 1 for images in copies),
    )


def _groups(keys: Sequence[str], pattern: str) -> list[str]:
    try:
        rule = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--group-by '{pattern}' is not a regular expression: {error}") from None
    matches = [rule.search(key) for key in keys]
    if None in matches:
        count, first = matches.count(None), keys[matches.index(None)]
        raise UsageError(f"--group-by '{pattern}' finds nothing in {count:,} of {len(keys):,} names: {first}")
    return [match[1 if rule.groups else 0] or "" for match in matches if match]


def _paths_from(folder: Path, root: Path, keys: Sequence[str]) -> list[str]:
    """The images from `folder`, where the table lies: both can be moved together."""
    relative_root = Path(os.path.relpath(root.resolve(), folder.resolve()))
    return [(relative_root / key).as_posix() for key in keys]


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Where the shards lie, and how much they hold."""

    out: Path
    images: int
    shards: int
    megabytes: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        rows = {
            "images": f"{self.images:,}",
            "shards": f"{self.shards:,}, {self.megabytes:,.1f} MB",
            "folder": self.out,
        }
        return [f"{name:<8} {text}" for name, text in rows.items()]


@takes(ShardOptions)
def shard_data(options: ShardOptions) -> Sharded:
    """Write `data` to the folder `out` as WebDataset shards of `per_shard` images.

    The same call after an interruption resumes. Files are copied as they are, synthetic images become PNG, and a file that is
    not an image stops the work with its name: what is left out of a set is for its owner to decide.
    """
    data, out, per_shard, workers = options.data, Path(options.out), options.per_shard, options.workers
    if per_shard < 1 or (workers is not None and workers < 1):
        raise UsageError("--per-shard and --workers must be at least 1")
    console = Console(quiet=options.quiet)
    opened = open_data(data, columns=options.columns, console=console)
    total = sum(len(part) for part in opened.parts.values())
    stop_if_dry_run(
        options.dry_run,
        {
            "data": f"{data}: {counted(total, len(opened.classes))}",
            "shards": f"{sum(-(-len(part) // per_shard) for part in opened.parts.values()):,} of {per_shard:,} images at most",
            "out": f"{out}{', to be resumed where it has shards of this data' if out.exists() else ''}",
        },
    )
    with console.progress("shard", total) as advance:
        table = write_shards(opened, out, per_shard=per_shard, workers=num_workers(workers), advance=advance)
    size = sum(shard["bytes"] for shard in table.values())
    return Sharded(out, total, len(table), round(size / 1e6, 1))
