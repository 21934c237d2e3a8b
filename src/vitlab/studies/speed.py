"""Images per second and the largest batch of a model at one image size: Figure 12, and what attention costs."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vitlab.core.errors import VitlabError
from vitlab.core.runtime import out_of_memory
from vitlab.models.build import Model, create_model
from vitlab.studies.study import SpeedRule

_SECONDS, _REPEATS = {"cuda": 0.1}, 5  # of one timing; the median of several
_SECONDS_ELSEWHERE = 0.3
_FACTOR = 4  # from one batch to the next that is tried
_MOST = {"cuda": 4096}  # images at once
_MOST_ELSEWHERE = 16
_WORTHWHILE = 1.03  # a larger batch that is not faster by this is the last


def measure_speed(rule: SpeedRule, device: torch.device) -> tuple[Model, dict[str, float]]:
    """The model, and its images per second in inference.

    On a GPU, and where the batch is not given, also the largest batch that its memory has room for, by what the last two took.
    """
    side, batch = rule.image_size, rule.batch
    model = create_model(rule.model, num_classes=1000, image_size=(side, side), seed=0).to(device).eval()
    dtype = torch.float32 if rule.precision == "fp32" else torch.bfloat16
    speeds, memory, size = list[float](), dict[int, int](), batch or 1
    while size <= max(batch, _MOST.get(device.type, _MOST_ELSEWHERE)):
        images_BCYX = torch.rand(size, 3, side, side, device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            speeds.append(_images_per_second(model, images_BCYX, dtype))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            break
        if device.type == "cuda":
            memory[size] = torch.cuda.max_memory_allocated(device)
        if batch or (size >= _MOST_ELSEWHERE and speeds[-1] < _WORTHWHILE * speeds[-2]):
            break
        size *= _FACTOR
    if not speeds:
        raise VitlabError(f"not even one image of {side} pixels fits into the memory of {device}")
    found = {"images_per_second": max(speeds), "milliseconds_per_image": 1000 / max(speeds)}
    return model, found | ({"largest_batch": _largest_batch(memory, device)} if len(memory) > 1 else {})


def _largest_batch(memory: Mapping[int, int], device: torch.device) -> float:
    """How many images fit: what is left beside the weights, over what each image more has taken."""
    (fewer, before), (more, after) = list(memory.items())[-2:]
    each = (after - before) / (more - fewer)
    return float(int((torch.cuda.get_device_properties(device).total_memory - (after - more * each)) / each))


@torch.no_grad()
def _images_per_second(model: Model, images_BCYX: Tensor, dtype: torch.dtype) -> float:
    device = images_BCYX.device

    def forward() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            model(images_BCYX)

    _timed(forward, device, 1)  # compiles kernels, fills caches
    times = max(1, int(_SECONDS.get(device.type, _SECONDS_ELSEWHERE) / _timed(forward, device, 1)))
    return len(images_BCYX) * times / statistics.median(_timed(forward, device, times) for _ in range(_REPEATS))


def _timed(work: Callable[[], None], device: torch.device, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
