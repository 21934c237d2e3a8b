"""The peers of `bench/training.py`: one training loop of each, in a process of its own, until it is stopped from outside.

    python bench/training_peers.py timm JOB.json LOG.jsonl

Adds a line to LOG every few steps, in the words of vitlab's metrics.jsonl. Both decode with Pillow and transform with
torchvision, as their own scripts and guides do.
"""

import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

# PyPI's torchvision does not import beside a CPU build of torch unless these two operators are declared first.
try:
    from torchvision import transforms
except RuntimeError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import transforms

Job = dict[str, Any]
FOREVER = 10**6  # steps; the one who measures ends it
GRAPHS = "reduce-overhead"  # torch.compile's mode with CUDA graphs, as vitlab has it


class Packed(torch.utils.data.Dataset[Any]):
    """The encoded images of an archive, decoded one by one. `transform` is set by whoever loads them."""

    def __init__(self, path: str, *, as_dict: bool) -> None:
        stored = np.load(path)
        self.data, self.offsets, self.labels = stored["data"], stored["offsets"], stored["labels"]
        self.as_dict, self.transform = as_dict, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        file = self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()
        image: Any = Image.open(io.BytesIO(file)).convert("RGB")
        image, label = image if self.transform is None else self.transform(image), int(self.labels[i])
        return {"pixel_values": image, "labels": label} if self.as_dict else (image, label)


class Log:
    """One line for every `every` steps: what the measuring process reads."""

    def __init__(self, path: str, job: Job, model: nn.Module, mode: str | None) -> None:
        self.path, self.job, self.mode, self.steps = Path(path), job, mode, 0
        self.parameters = sum(p.numel() for p in model.parameters())
        self._waits: list[tuple[Any, Any]] = []
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """For a batch. As in vitlab's log, a GPU's time counts where there is one: from when it had done all that it was sent
        until the batch was there."""
        asked = self._now()
        yield
        self._waits.append((asked, self._now()))

    def _now(self) -> Any:
        if self.job["device"] != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def _waited(self) -> float:
        on_gpu = self.job["device"] == "cuda"
        found = sum(a.elapsed_time(b) / 1000 if on_gpu else b - a for a, b in self._waits)
        self._waits = []
        return found

    def step(self, loss: torch.Tensor) -> None:
        self.steps += 1
        every = self.job["every"]
        if self.steps % every:
            return
        value = loss.item()  # waits for a GPU, so that the time is that of work done
        now = time.perf_counter()
        record = {
            "step": self.steps,
            "steps": every,
            "loss": value,
            "images_per_second": every * self.job["batch"] / (now - self.began),
            "data_wait_frac": self._waited() / (now - self.began),
            "memory_gb": _memory_gb(self.job["device"]),
            "parameters": self.parameters,
            "compiled": self.mode,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.began = now


def _memory_gb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _moved(job: Job, last: list[Any]) -> Any:
    """The transforms of a training image up to its final size, then `last`."""
    side = job["side"]
    first = transforms.RandomCrop(side, padding=job["shift"])
    if not job["shift"]:
        first = transforms.RandomResizedCrop(side, tuple(job["area"]), tuple(job["aspect"]))
    return transforms.Compose([first, transforms.RandomHorizontalFlip(), *last])


def run_timm(job: Job, log: str) -> None:
    """Loader, model and optimiser of timm in the bare loop of its train.py: bf16 by autocast, gradients clipped."""
    import timm
    from timm.data import create_loader
    from timm.data.transforms import ToNumpy
    from timm.optim import create_optimizer_v2

    device, shape = torch.device(job["device"]), job["shape"]
    dataset = Packed(job["archive"], as_dict=False)
    loader = create_loader(
        dataset,
        input_size=(3, job["side"], job["side"]),
        batch_size=job["batch"],
        is_training=True,
        scale=tuple(job["area"]),
        ratio=tuple(job["aspect"]),
        color_jitter=None,
        interpolation="bilinear",
        mean=tuple(job["mean"]),
        std=tuple(job["std"]),
        num_workers=job["workers"],
        pin_memory=device.type == "cuda",
        device=device,
    )
    if job["shift"]:  # its factory has no shift within a frame; uint8 for the prefetcher, as its own transforms end
        dataset.transform = _moved(job, [ToNumpy()])
    model = timm.create_model(
        "vit_base_patch16_224",  # the plain one; everything that has a size is given
        img_size=job["side"],
        patch_size=shape["patch"],
        embed_dim=shape["width"],
        depth=shape["depth"],
        num_heads=shape["heads"],
        mlp_ratio=shape["mlp_dim"] / shape["width"],
        num_classes=job["num_classes"],
    ).to(device, memory_format=torch.channels_last)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=job["lr"], weight_decay=job["weight_decay"], **fused)
    mode = GRAPHS if job["compiled"] else None
    forward = torch.compile(model, mode=mode) if mode else model
    narrow = torch.autocast(device.type, dtype=torch.bfloat16, enabled=job["precision"] == "bf16")
    model.train()
    notes = Log(log, job, model, mode)
    while notes.steps < FOREVER:
        batches = iter(loader)
        while True:
            with notes.waiting():
                batch = next(batches, None)
            if batch is None:
                break
            images, targets = batch
            with narrow:
                loss = nn.functional.cross_entropy(
                    forward(images.contiguous(memory_format=torch.channels_last)), targets
                )
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), job["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            notes.step(loss)


def run_transformers(job: Job, log: str) -> None:
    """The Trainer, compiled for CUDA graphs if that works with it, else in the plain way."""
    if not job["compiled"]:
        return _run_trainer(job, log, None)
    try:
        _run_trainer(job, log, GRAPHS)
    except RuntimeError:
        _run_trainer(job, log, "default")


def _run_trainer(job: Job, log: str, mode: str | None) -> None:
    """With torchvision's transforms, as the guide to image classification has it."""
    import transformers

    shape = job["shape"]
    dataset = Packed(job["archive"], as_dict=True)
    dataset.transform = _moved(job, [transforms.ToTensor(), transforms.Normalize(job["mean"], job["std"])])
    config = transformers.ViTConfig(
        image_size=job["side"],
        patch_size=shape["patch"],
        hidden_size=shape["width"],
        num_hidden_layers=shape["depth"],
        num_attention_heads=shape["heads"],
        intermediate_size=shape["mlp_dim"],
        num_labels=job["num_classes"],
    )
    model = transformers.ViTForImageClassification(config)
    notes = Log(log, job, model, mode)

    class Timed(transformers.Trainer):
        """Nothing else than the clock: how long it waits for data, and when a step has ended."""

        loss = torch.zeros(())

        def get_batch_samples(self, *given: Any) -> Any:
            with notes.waiting():
                return super().get_batch_samples(*given)

        def training_step(self, *given: Any) -> Any:
            self.loss = super().training_step(*given)
            return self.loss

    class AfterStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            notes.step(trainer.loss)

    arguments = transformers.TrainingArguments(
        output_dir=str(Path(log).parent),
        max_steps=FOREVER,
        per_device_train_batch_size=job["batch"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=job["weight_decay"],
        max_grad_norm=job["max_grad_norm"],
        bf16=job["precision"] == "bf16",
        use_cpu=job["device"] == "cpu",
        torch_compile=mode is not None,
        torch_compile_mode=mode,
        dataloader_num_workers=job["workers"],
        dataloader_persistent_workers=job["workers"] > 0,
        dataloader_pin_memory=job["device"] == "cuda",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Timed(model=model, args=arguments, train_dataset=dataset, callbacks=[AfterStep()])
    trainer.train()


if __name__ == "__main__":
    peer, job_file, log_file = sys.argv[1:]
    {"timm": run_timm, "transformers": run_transformers}[peer](json.loads(Path(job_file).read_text()), log_file)
