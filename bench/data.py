"""From encoded JPEGs to a normalised training batch: images per second beside the peers, in one run on this machine.

Decode, random resized crop to 224 pixels, mirror, normalise; one worker process and two. The photos are 500 x 375 pixels of
quality 90, mosaics of real ones at their own scale, so that they keep their detail. Rounds are interleaved, so that a busy
moment hits everybody; the median counts. A second table says what one image costs a worker process, ours and timm's, in three
usual jobs. Run by `make bench` in the peers' environment; `--write FILE` records the tables.
"""

import argparse
import functools
import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from training_peers import Packed

from vitlab.data import decode
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.crops import CropRule, crop_array
from vitlab.data.batches import Order
from vitlab.data.loader import BadImages, TrainInputs, train_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.sources.packed import open_packed

# PyPI's torchvision does not import beside a CPU build of torch unless these two operators are declared first.
try:
    import torchvision
except RuntimeError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))
SIDE, BATCH = 224, 32
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)  # torchvision's defaults
Job = Callable[[list[bytes]], Iterable[Tensor]]


def photos(count: int) -> list[bytes]:
    """JPEGs of 500 x 375 pixels, tiled from photos of at least 160 pixels a side."""
    packed = np.load(DATA / "imagenet_samples" / "imagenet_850.npz")
    raw, offsets = packed["data"].tobytes(), packed["offsets"]
    tiles = [Image.open(io.BytesIO(raw[offsets[i] : offsets[i + 1]])).convert("RGB") for i in range(len(offsets) - 1)]
    chance, made = np.random.default_rng(0), list[bytes]()
    for _ in range(count):
        canvas = Image.new("RGB", (500, 375))
        for top in range(0, 375, 160):
            for left in range(0, 500, 160):
                canvas.paste(tiles[chance.integers(len(tiles))].crop((0, 0, 160, 160)), (left, top))
        buffer = io.BytesIO()
        canvas.save(buffer, "JPEG", quality=90)
        made.append(buffer.getvalue())
    return made


def ours() -> Job:
    preprocess, crop, change = Preprocess(), CropRule(how="torchvision", area=AREA, aspect=ASPECT), AugmentRule()

    def work(files: list[bytes]) -> Iterable[Tensor]:
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            cropped = [
                crop_array(file, preprocess, crop, seed=0, epoch=0, sample=start + i) for i, file in enumerate(part)
            ]
            images_BCYX = torch.from_numpy(np.stack(cropped)).permute(0, 3, 1, 2)
            ids_B = torch.arange(start, start + len(part))
            yield normalise(preprocess, augment(images_BCYX, ids_B, change, seed=0, epoch=0))

    return work


def torchvision_style() -> Job:
    """The transforms of every tutorial, on Pillow images."""
    from torchvision import transforms

    chain = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE, AREA, ASPECT),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )

    def work(files: list[bytes]) -> Iterable[Tensor]:
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            yield torch.stack([chain(Image.open(io.BytesIO(file)).convert("RGB")) for file in part])

    return work


def torchvision_v2() -> Job:
    """The newer transforms, on tensors, uint8 until the end: what torchvision's own advice for speed is."""
    from torchvision.transforms import v2

    chain = v2.Compose(
        [
            v2.PILToTensor(),
            v2.RandomResizedCrop(SIDE, AREA, ASPECT, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )

    def work(files: list[bytes]) -> Iterable[Tensor]:
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            yield torch.stack([chain(Image.open(io.BytesIO(file)).convert("RGB")) for file in part])

    return work


class _InMemory(torch.utils.data.Dataset[Any]):
    """As timm's ImageDataset, with the files already read."""

    def __init__(self, files: list[bytes]) -> None:
        self.files, self.transform = files, None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        return (self.transform(image) if self.transform else image), 0


def timm_loader() -> Job:
    """Its loader as train.py sets it up: uint8 from the transforms, normalised a batch at a time."""
    from timm.data import create_loader

    def work(files: list[bytes]) -> Iterable[Tensor]:
        loader = create_loader(
            _InMemory(files),
            input_size=(3, SIDE, SIDE),
            batch_size=BATCH,
            is_training=True,
            scale=AREA,
            ratio=ASPECT,
            color_jitter=None,
            interpolation="bilinear",
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            num_workers=0,
            use_prefetcher=True,
            pin_memory=False,
            persistent_workers=False,
            device=torch.device("cpu"),
        )
        for images, _ in loader:
            yield images

    return work


def transformers_processor(name: str) -> Job:
    """Its processor has no random crop: torchvision's box is cut out by Pillow, and the processor does what follows."""
    import transformers
    from torchvision import transforms

    processor = getattr(transformers, name)(size={"height": SIDE, "width": SIDE})

    def one(file: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(file)).convert("RGB")
        top, left, rows, cols = transforms.RandomResizedCrop.get_params(image, AREA, ASPECT)
        image = image.crop((left, top, left + cols, top + rows))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image

    def work(files: list[bytes]) -> Iterable[Tensor]:
        for start in range(0, len(files), BATCH):
            part = [one(file) for file in files[start : start + BATCH]]
            yield processor(images=part, return_tensors="pt")["pixel_values"]

    return work


CONTESTANTS: dict[str, Callable[[], Job]] = {
    "vitlab": ours,
    "torchvision, Pillow": torchvision_style,
    "torchvision v2, tensors": torchvision_v2,
    "timm loader": timm_loader,
    "transformers processor": functools.partial(transformers_processor, "ViTImageProcessor"),
    "transformers processor, Pillow": functools.partial(transformers_processor, "ViTImageProcessorPil"),
}


def _worker(name: str, files: list[bytes], pipe: Any) -> None:
    """Lives through all rounds: each message is one pass over the files, answered with its start and end."""
    torch.set_num_threads(1)
    job = CONTESTANTS[name]()
    while pipe.recv():
        started, count = time.monotonic(), 0
        for batch in job(files):
            assert batch.shape[1:] == (3, SIDE, SIDE) and batch.dtype == torch.float32
            count += len(batch)
        pipe.send((started, time.monotonic(), count))


def measure(files: list[bytes], workers: int, rounds: int) -> dict[str, list[float]]:
    """Images per second of each contestant in each of the `rounds`; the first pass of each only warms up."""
    context = multiprocessing.get_context("fork")
    pipes: dict[str, list[Any]] = {}
    for name in CONTESTANTS:
        for _ in range(workers):
            here, there = context.Pipe()
            context.Process(target=_worker, args=(name, files, there), daemon=True).start()
            pipes.setdefault(name, []).append(here)
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds + 1):
        for name, ends in pipes.items():
            for end in ends:
                end.send(True)
            spans = [end.recv() for end in ends]
            if turn:
                seconds = max(span[1] for span in spans) - min(span[0] for span in spans)
                rates[name].append(sum(span[2] for span in spans) / seconds)
    for ends in pipes.values():
        for end in ends:
            end.send(False)
    return rates


def ratio(rates: dict[str, list[float]], name: str) -> float:
    """How much faster than `name` we are: the median over rounds, each of which is one moment of the machine."""
    return statistics.median(ours / theirs for ours, theirs in zip(rates["vitlab"], rates[name], strict=True))


# --- what one image costs a worker ------------------------------------------------------------------------------------

# What is trained on, below the data folder; the final side; the pixels of a shift, or 0 for a random resized crop.
WORK = {
    "CIFAR-10, 32 px, shifted": ("cifar10/cifar10_train.npz", 32, 4),
    "CIFAR-10, cropped to 224 px": ("cifar10/cifar10_train.npz", 224, 0),
    "Pets of 128 px, cropped to 224 px": ("oxford_pets/pets_trainval.npz", 224, 0),
}
WORK_BATCH = 128
Batches = Iterator[Any]


def our_batches(archive: str, side: int, shift: int) -> Batches:
    """As in a worker; the shift and the mirror are left to the device."""
    dataset = open_packed({"train": DATA / archive}).parts["train"]
    crop = CropRule(how="whole") if shift else CropRule(how="torchvision", area=AREA, aspect=ASPECT)
    rule, order = Preprocess(image_size=(side, side)), Order(len(dataset), WORK_BATCH, seed=0)
    return train_batches(TrainInputs(dataset, rule, crop, order), range(10**6), bad=BadImages(0))


def timm_batches(archive: str, side: int, shift: int) -> Batches:
    """Its transforms, with the shift of torchvision, and its way to stack images."""
    from timm.data import create_loader
    from timm.data.loader import fast_collate
    from timm.data.transforms import ToNumpy
    from torchvision import transforms

    dataset = Packed(str(DATA / archive), as_dict=False)
    # It gives the transforms to the data set; the loader itself is not used.
    create_loader(
        dataset,
        input_size=(3, side, side),
        batch_size=WORK_BATCH,
        is_training=True,
        scale=AREA,
        ratio=ASPECT,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    if shift:
        moved = [transforms.RandomCrop(side, padding=shift), transforms.RandomHorizontalFlip(), ToNumpy()]
        dataset.transform = transforms.Compose(moved)
    while True:
        for part in torch.randperm(len(dataset)).split(WORK_BATCH):
            yield fast_collate([dataset[i] for i in part.tolist()])


def worker_costs(rounds: int) -> list[str]:
    """Milliseconds of processor time per image, in this one process, whose turns alternate."""
    decode.hush_process()
    rows = ["| job of a worker | timm, ms per image | vitlab | / timm | vitlab with `fast` | / timm |"]
    rows.append("|---|---|---|---|---|---|")
    simplejpeg = decode.simplejpeg
    for title, work in WORK.items():
        makers = {"timm": timm_batches(*work), "Pillow": our_batches(*work), "fast": our_batches(*work)}
        spent: dict[str, list[float]] = {name: [] for name in makers}
        for turn in range(rounds + 1):  # the first only warms up
            for name, batches in makers.items():
                decode.simplejpeg = simplejpeg if name == "fast" else None
                began = time.process_time()
                next(batches)
                spent[name] += [1000 * (time.process_time() - began) / WORK_BATCH] if turn else []
        cells = [f"{statistics.median(spent['timm']):.3f}"]
        for name in ("Pillow", "fast"):
            share = statistics.median(ours / theirs for ours, theirs in zip(spent[name], spent["timm"], strict=True))
            cells += [f"{statistics.median(spent[name]):.3f}", f"{share:.2f}"]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    decode.simplejpeg = simplejpeg
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="record the table in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = photos(arguments.images)
    found = {workers: measure(files, workers, arguments.rounds) for workers in (1, 2)}
    rows = ["| pipeline | 1 worker, img/s | vitlab / it | 2 workers, img/s | vitlab / it |"]
    rows.append("|---|---|---|---|---|")
    for name in CONTESTANTS:
        cells = [f"{statistics.median(found[n][name]):.0f} | {ratio(found[n], name):.2f}" for n in (1, 2)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    costs = worker_costs(arguments.rounds * 3)  # short ones
    print("\n".join([*rows, "", *costs]))
    if arguments.write:
        import timm
        import transformers

        size = sum(map(len, files)) / len(files) / 1000
        versions = f"torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}"
        arguments.write.parent.mkdir(exist_ok=True)
        arguments.write.write_text(
            "# From JPEGs to training batches, beside the peers (CPU)\n\n"
            f"{date.today()} · `python bench/data.py` · median of {arguments.rounds} interleaved rounds of "
            f"{arguments.images} JPEGs (500x375, quality 90, {size:.0f} KB) · one thread per worker, "
            f"{os.cpu_count()} cores · {versions}, Pillow {Image.__version__}, torchvision {torchvision.__version__}.\n"
            "Decode, random resized crop to 224, mirror, normalise. All but vitlab decode with Pillow, as they do by default; "
            "vitlab has its extra `fast` installed.\n\n" + "\n".join(rows) + "\n\n"
            "From an encoded image to its place in a batch of bytes: processor time of one process and thread, median of "
            f"{arguments.rounds * 3} alternating batches of {WORK_BATCH}. vitlab leaves mirror and shift to the device.\n\n"
            + "\n".join(costs)
            + "\n"
        )


if __name__ == "__main__":
    main()
