"""Several processes that train one model: who am I, and how do we agree. One process alone is the same code with nothing to do.

Started by `torchrun` (or Slurm), which sets the environment that `join` reads; the same command without it runs alone.
"""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Generator, Mapping

import torch
import torch.distributed as distributed
from torch import Tensor

from vitlab.core.errors import UsageError

_PATIENCE = datetime.timedelta(minutes=10)  # a process that is this late has died, and the others should say so


@dataclasses.dataclass(frozen=True)
class World:
    """`rank` of `size` processes; `device` is this one's."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def total(self, number: float) -> float:
        """The sum over all processes."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, dtype=torch.float64, device=self.device)
        distributed.all_reduce(shared)
        return float(shared)

    def largest(self, number: int) -> int:
        """The largest over all processes: how all learn that one has met something."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
        return int(shared)

    def gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, of equal shape, one after the other along the first axis."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def merged(self, table: Mapping[str, str]) -> dict[str, str]:
        """The tables of all processes as one, in the same order everywhere."""
        if self.size == 1:
            return dict(table)
        own = torch.frombuffer(bytearray(json.dumps(dict(table)).encode()), dtype=torch.uint8)
        padded = torch.full((self.largest(len(own)),), ord(" "), dtype=torch.uint8)
        padded[: len(own)] = own
        rows = self.gathered(padded.to(self.device)).cpu().view(self.size, -1)
        return {key: text for row in rows for key, text in json.loads(row.numpy().tobytes()).items()}

    def meet(self) -> None:
        """Waits for all."""
        if self.size > 1:
            distributed.barrier()


@contextlib.contextmanager
def join(device: torch.device) -> Generator[World]:
    """The world this process was started in; leaves it at the end, so that a library call leaves no marks."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield World(0, 1, device)
        return
    if distributed.is_initialized():
        raise UsageError("this process is already part of a group; vitlab makes its own")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield World(rank, size, device)
    finally:
        distributed.destroy_process_group()
