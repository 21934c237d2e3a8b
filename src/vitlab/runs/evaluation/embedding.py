"""`vitlab embed`: one vector per image, with paths and labels. What was computed before is not computed again."""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.environment import cache_folder
from vitlab.core.errors import amount
from vitlab.core.parquet import Column, parquet_chunks
from vitlab.core.planned import counted, stop_if_dry_run
from vitlab.core.session import open_session
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.unlabelled import open_for_inference
from vitlab.engines.classifier import describe_model, hint_swapped_arguments, load, stop_dry_run_before_download
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.evaluation.row_store import ImageRows, pick_rows
from vitlab.options.evaluation_options import EmbedOptions
from vitlab.options.option import takes
from vitlab.runs.evaluation.prediction import RESUMES, require_new, require_out, tell_bad

_ROWS = 4096  # of a file written at a time


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Where the vectors lie. `computed` images went through the model now; the others were in the cache.

    Without a file they are in `rows`, each with `path`, `split`, `label` and `vector`.
    """

    out: Path | None
    images: int
    width: int  # numbers in a vector
    computed: int  # images that the model was run on; the others were in the cache
    seconds: float
    images_per_second: float
    bad: Mapping[str, str]  # the reason, by path
    rows: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> Any:
        """The account of a file, or the rows themselves where there is none."""
        done = dataclasses.asdict(self)
        rows = done.pop("rows")
        return rows if self.out is None else done

    def sentences(self) -> list[str]:
        fresh = (
            f"{self.computed:,} computed at {self.images_per_second:.0f} img/s" if self.computed else "none computed"
        )
        kept = self.images + len(self.bad) - self.computed
        rest = f", {kept:,} from the cache" if kept else ""
        skipped = [f"without {amount(len(self.bad), 'image')} that could not be read"] if self.bad else []
        where = "memory" if self.out is None else self.out
        return [f"{self.images:,} vectors of {self.width:,} numbers in {where} ({fresh}{rest})", *skipped]


@takes(EmbedOptions)
def embed(options: EmbedOptions) -> Embedding:
    """Write the vector of every image of `data` to the new file `out`: .parquet, .npz, .csv or .json; or return them.

    The columns are `path`, `split`, `label` and `vector`; labels of an image are joined by ';', and empty where there are none.
    A .csv has a column for each number; without `out`, the rows are in the result.
    `data` is anything that `train` takes, or loose images: a folder without classes, a list of files. `part` takes one part.
    The vector is what the head sees, or with `layers` and `tokens` those of `model.features`, layers concatenated.
    Vectors are kept in `cache` in chunks, so that the same call after an interruption, or a second one, resumes from there.
    Under torchrun or srun each process computes its share, in a `cache` that all of them see, and the first writes the file.
    """
    model, data = options.model, options.data
    path = None if options.out is None else require_new(Path(options.out), _FORMATS, "vectors")
    rule = FeatureRule(tuple(options.layers or ()), options.tokens)
    inference = InferenceOptions(options.batch_size, options.workers)
    with open_session(options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose) as (
        _,
        world,
        console,
    ):
        require_out(world, path)
        with hint_swapped_arguments([model], [data] if isinstance(data, str | Path) else data):
            opened = open_for_inference(data, options.columns, console)
            total = counted(sum(map(len, opened.parts.values())))
            stop_dry_run_before_download(options.dry_run, [model], {"images": total, "out": path})
            classifier = load(model, device=str(world.device), quiet=options.quiet, trust_pickle=options.trust_pickle)
        if options.part is not None:
            opened = Opened({options.part: opened.part(options.part)}, opened.notes)
        total = counted(sum(map(len, opened.parts.values())))
        stop_if_dry_run(options.dry_run, {"model": describe_model(classifier), "images": total, "out": path})
        for note in opened.notes if world.is_main else ():
            console.say(note)
        try:
            found = {
                name: features_of(
                    classifier,
                    dataset,
                    rule,
                    cache=cache_folder() / "features" if options.cache is None else Path(options.cache),
                    console=console,
                    options=inference,
                    world=world,
                    label=name,
                )
                for name, dataset in opened.parts.items()
            }
        except Stopped as stopped:
            stopped.advice = RESUMES
            raise
        rows = {name: features.readable().nonzero()[:, 0] for name, features in found.items()}
        if path is not None:
            world.run_or_fail_everywhere(lambda: _write(path, opened, found, rows) if world.is_main else None)
    bad = {name: why for features in found.values() for name, why in features.bad.items()}
    tell_bad(bad, console)
    computed = sum(features.computed for features in found.values())
    seconds = sum(features.seconds for features in found.values())
    return Embedding(
        out=path,
        images=sum(map(len, rows.values())),
        width=next(iter(found.values())).width,
        computed=computed,
        seconds=round(seconds, 3),
        images_per_second=round(computed / seconds, 1),
        bad=bad,
        rows=[] if path is not None else list(_as_rows(opened, found, rows)),
    )


# --- storing ----------------------------------------------------------------------------------------------------------


Found = Mapping[str, ImageRows]
Rows = Mapping[str, Tensor]


def _write(path: Path, opened: Opened, found: Found, rows: Rows) -> None:
    fsio.make_folder(path.parent)
    fsio.write_new_file(path, _FORMATS[path.suffix.lower()](opened, found, rows))


def _tables(opened: Opened, found: Found, rows: Rows) -> Iterator[dict[str, Column]]:
    """The columns of some thousand images at a time."""
    for name, features in found.items():
        for index in rows[name].split(_ROWS):
            columns = _columns(opened.parts[name], name, index)
            yield {**columns, "vector": pick_rows(features.chunks, index).numpy()}


def _parquet(opened: Opened, found: Found, rows: Rows) -> Iterator[bytes]:
    return parquet_chunks(_tables(opened, found, rows))


def _npz(opened: Opened, found: Found, rows: Rows) -> bytes:
    """Made in memory as a whole; for more vectors than fit there, parquet is written in pieces."""
    tables = [_columns(opened.parts[name], name, rows[name]) for name in found]

    def column(name: str) -> "np.ndarray[Any, Any]":
        return np.array([value for table in tables for value in table[name]], dtype=np.str_)

    vectors = torch.cat([pick_rows(features.chunks, rows[name]) for name, features in found.items()])
    buffer = io.BytesIO()
    np.savez(buffer, path=column("path"), split=column("split"), label=column("label"), vector=vectors.numpy())
    return buffer.getvalue()


def _csv(opened: Opened, found: Found, rows: Rows) -> Iterator[bytes]:
    text = io.StringIO()
    writer, names = csv.writer(text, lineterminator="\n"), list[str]()
    for row in _as_rows(opened, found, rows):
        *cells, vector = row.values()
        if not names:
            names = [*list(row)[:-1], *(f"v{i}" for i in range(len(vector)))]
            writer.writerow(names)
        writer.writerow([*cells, *vector])
        yield text.getvalue().encode("utf-8", "surrogateescape")
        text.seek(text.truncate(0))


def _json(opened: Opened, found: Found, rows: Rows) -> Iterator[bytes]:
    before = "[\n"
    for row in _as_rows(opened, found, rows):
        yield (before + json.dumps(row)).encode()
        before = ",\n"
    yield b"\n]\n" if before != "[\n" else b"[]\n"


def _as_rows(opened: Opened, found: Found, rows: Rows) -> Iterator[dict[str, Any]]:
    for table in _tables(opened, found, rows):
        # By text, which of a float32 is the shortest that means it: half as long as the same number in double precision.
        texts = np.asarray(table["vector"]).astype(np.str_)
        for i, vector in enumerate(texts):
            columns = {name: column[i] for name, column in table.items() if name != "vector"}
            yield {**columns, "vector": [float(number) for number in vector]}


_FORMATS: Mapping[str, Callable[[Opened, Found, Rows], bytes | Iterator[bytes]]] = {
    ".parquet": _parquet,
    ".npz": _npz,
    ".csv": _csv,
    ".json": _json,
}


def _columns(dataset: Dataset, part: str, index: Tensor) -> dict[str, list[str]]:
    names = [";".join(dataset.classes[label] for label in dataset.labels[i]) for i in index.tolist()]
    return {"path": [str(dataset.keys[i]) for i in index.tolist()], "split": [part] * len(index), "label": names}
