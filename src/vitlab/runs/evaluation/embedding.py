"""`vitlab embed`: one vector per image, with paths and labels, in a file. What was computed before is not computed again."""

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.environment import cache_folder
from vitlab.core.errors import UsageError
from vitlab.core.parquet import Column, parquet_chunks, require_parquet
from vitlab.core.session import open_session, require_single_process
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.folders import holds_classes
from vitlab.data.sources.loose_images import open_loose
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import hint_swapped_arguments, load
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.features import FeatureRule, FeatureSet, features_of, pick_rows
from vitlab.options.evaluation_options import EmbedOptions
from vitlab.options.option import takes
from vitlab.runs.evaluation.prediction import tell_bad

FORMATS = (".parquet", ".npz")
_ROWS = 4096  # of a parquet file written at a time


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Where the vectors lie. `computed` images went through the model now; the others were in the cache."""

    out: Path
    images: int
    width: int  # numbers in a vector
    computed: int  # images that the model was run on; the others were in the cache
    seconds: float
    images_per_second: float
    bad: Mapping[str, str]  # the reason, by path

    def sentences(self) -> list[str]:
        fresh = (
            f"{self.computed:,} computed at {self.images_per_second:.0f} img/s" if self.computed else "none computed"
        )
        kept = self.images + len(self.bad) - self.computed
        rest = f", {kept:,} from the cache" if kept else ""
        skipped = [f"{len(self.bad):,} image(s) could not be read and are not in it"] if self.bad else []
        return [f"{self.images:,} vectors of {self.width:,} numbers in {self.out} ({fresh}{rest})", *skipped]


@takes(EmbedOptions)
def embed(options: EmbedOptions) -> Embedding:
    """Writes the vector of every image of `data` to the new file `out`, a .parquet or a .npz.

    Its columns are `path`, `split`, `label` and `vector`; labels of an image are joined by ';', and empty where there are none.
    `data` is anything that `train` takes, or loose images: a folder without classes, a list of files. `part` takes one part.
    The vector is what the head sees, or with `layers` and `tokens` those of `model.features`, layers concatenated.
    Vectors are kept in `cache` in chunks, so that the same call after an interruption, or a second one, goes on from there.
    """
    model, data = options.model, options.data
    path = _require_new(Path(options.out))
    rule = FeatureRule(tuple(options.layers or ()), options.tokens)
    inference = InferenceOptions(options.batch_size, options.workers)
    with open_session(options.device, options.seed, options.threads, quiet=options.quiet, verbose=options.verbose) as (
        _,
        world,
        console,
    ):
        require_single_process(world, "vectors are computed")
        with hint_swapped_arguments([model], [data] if isinstance(data, str | Path) else data):
            opened = _open(data, console)
            classifier = load(model, device=str(world.device), quiet=options.quiet)
        if options.part is not None:
            opened = Opened({options.part: opened.part(options.part)}, opened.notes)
        for note in opened.notes:
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
                    label=name,
                )
                for name, dataset in opened.parts.items()
            }
        except Stopped as stopped:
            stopped.advice = "What is computed is kept: the same command resumes from there"
            raise
    bad = {name: why for features in found.values() for name, why in features.bad.items()}
    tell_bad(bad, console)
    rows = {name: features.readable().nonzero()[:, 0] for name, features in found.items()}
    fsio.make_folder(path.parent)
    encode = _parquet if path.suffix.lower() == ".parquet" else _npz
    fsio.write_new_file(path, encode(opened, found, rows))
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
    )


def _require_new(path: Path) -> Path:
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path} should end in {' or '.join(FORMATS)}: that says how the vectors are stored")
    if path.suffix.lower() == ".parquet":
        require_parquet()
    return fsio.require_free(path)


def _open(data: str | Path | Sequence[str | Path], console: Console) -> Opened:
    """As everywhere; but images in no class folder need no label here, and are taken as they lie."""
    if not isinstance(data, str | Path) and len(data) == 1:
        (data,) = data
    if not isinstance(data, str | Path):
        return Opened({"all": open_loose(data)})
    path = Path(data)
    if path.is_dir() and not holds_classes(path) and not any(path.glob("*.tar")):
        return Opened({"all": open_loose([path])})
    return open_data(data, console=console)


# --- storing ----------------------------------------------------------------------------------------------------------


def _parquet(opened: Opened, found: Mapping[str, FeatureSet], rows: Mapping[str, Tensor]) -> Iterator[bytes]:
    def tables() -> Iterator[Mapping[str, Column]]:
        for name, features in found.items():
            for index in rows[name].split(_ROWS):
                columns = _columns(opened.parts[name], name, index)
                yield columns | {"vector": pick_rows(features.chunks, index).numpy()}

    return parquet_chunks(tables())


def _npz(opened: Opened, found: Mapping[str, FeatureSet], rows: Mapping[str, Tensor]) -> bytes:
    """Made in memory as a whole; for more vectors than fit there, parquet is written in pieces."""
    tables = [_columns(opened.parts[name], name, rows[name]) for name in found]

    def column(name: str) -> "np.ndarray[Any, Any]":
        return np.array([value for table in tables for value in table[name]], dtype=np.str_)

    vectors = torch.cat([pick_rows(features.chunks, rows[name]) for name, features in found.items()])
    buffer = io.BytesIO()
    np.savez(buffer, path=column("path"), split=column("split"), label=column("label"), vector=vectors.numpy())
    return buffer.getvalue()


def _columns(dataset: Dataset, part: str, index: Tensor) -> dict[str, list[str]]:
    names = [";".join(dataset.classes[label] for label in dataset.labels[i]) for i in index.tolist()]
    return {"path": [str(dataset.keys[i]) for i in index.tolist()], "split": [part] * len(index), "label": names}
