"""Collectives between the processes of a run; with one process they do nothing.

Started by `torchrun` or Slurm's `srun`, which set variables that `launch.py` reads; the same command without them runs alone.
"""

# pyright: reportPrivateImportUsage=false
# torch's tables of addresses are documented under `torch.distributed`, but do not count as public there.

import contextlib
import dataclasses
import datetime
import json
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import DistError

from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.launch import Launch, read_launch

_TIMEOUT = datetime.timedelta(hours=1)  # of a collective: the first process may be filling a cache for all
_CONNECT_TIMEOUT = datetime.timedelta(seconds=5)
_LAST_WORK_S = 0.25  # for gloo's threads, on a busy machine too
T = TypeVar("T")


class FailedElsewhere(VitlabError):
    """Joint work failed in another process, which reports why."""


class ProcessLost(VitlabError):
    """Another process of the run has died or hangs; the last checkpoint is unharmed."""

    def __init__(self, error: RuntimeError) -> None:
        sentence = str(error).partition(". ")[0].partition("\n")[0]
        reason = re.sub(r"^\[\S+\] ", "", sentence)  # without a place in torch's sources
        super().__init__(
            f"another process of the run is gone or does not answer ({reason})",
            hint="The launcher reports which one. Training resumes from its last checkpoint with --resume; "
            "predict and embed resume by the same command.",
        )


@dataclasses.dataclass(frozen=True)
class World:
    """`rank` of `size` processes, its `device`, and the process `group` to use."""

    rank: int
    size: int
    device: torch.device
    group: distributed.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    def all_reduce_sum(self, number: float) -> float:
        """The sum over all processes."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, dtype=torch.float64, device=self.device)
        distributed.all_reduce(shared, group=self.group)
        return float(shared)

    def all_reduce_mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, of each number."""
        if self.size == 1:
            return tensor
        shared = tensor.clone()
        distributed.all_reduce(shared, group=self.group)
        return shared / self.size

    def all_reduce_max(self, number: int) -> int:
        """The largest over all processes."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=self.group)
        return int(shared)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all processes, of equal shape, along the first axis."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def gather_dict(self, table: Mapping[str, str]) -> dict[str, str]:
        """Merge the tables of all processes, in the same order everywhere."""
        if self.size == 1:
            return dict(table)
        encoded = torch.frombuffer(bytearray(json.dumps(dict(table)).encode()), dtype=torch.uint8)
        padded = torch.full((self.all_reduce_max(len(encoded)),), ord(" "), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        rows = self.all_gather(padded.to(self.device)).cpu().view(self.size, -1)
        return {key: text for row in rows for key, text in json.loads(row.numpy().tobytes()).items()}

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            distributed.barrier(group=self.group)

    def run_or_fail_everywhere(self, work: Callable[[], T]) -> T:
        """Run `work`; a VitlabError in one process is raised in all."""
        try:
            result = work()
        except VitlabError as error:
            self.gather_dict({str(self.rank): error.what})
            raise
        for rank, what in self.gather_dict({}).items():
            raise FailedElsewhere(f"in process {rank}: {what}")
        return result

    def new_process_group(self, timeout: datetime.timedelta = _TIMEOUT) -> "World":
        """A second process group over gloo, for a thread or for waits of another length. All processes must call it."""
        if self.size == 1:
            return self
        group = distributed.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, distributed.ProcessGroup)
        return World(self.rank, self.size, torch.device("cpu"), group)


@contextlib.contextmanager
def join(device: torch.device) -> Generator[World]:
    """Join the processes of this launch, and leave them at the end.

    Ending the others when one dies is the launcher's part; here, a collective that fails because of it becomes `ProcessLost`.
    """
    launch = read_launch()
    if launch.size == 1:
        yield World(0, 1, device)
        return
    if distributed.is_initialized():
        raise UsageError("this process is already part of a group; vitlab makes its own")
    if device.type == "cuda":
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_open_store(launch),
            rank=launch.rank,
            world_size=launch.size,
            timeout=_TIMEOUT,
        )
        world = World(launch.rank, launch.size, device)
        world.barrier()  # a process that exits at once must not look lost to one that still joins
        yield world
    except RuntimeError as error:
        if isinstance(error, DistError) or "gloo" in str(error):  # gloo's errors have no type
            raise ProcessLost(error) from error
        raise
    finally:
        if distributed.is_initialized():
            _left.append(distributed.group.WORLD)
            distributed.destroy_process_group()
            # A gloo thread that frees its last tensors needs the interpreter. After the interpreter has shut down, it would
            # abort the process (SIGABRT) although all work was done.
            time.sleep(_LAST_WORK_S)


# Groups that this process has left. Dropping the last reference to one waits for gloo's thread, which may wait for the GIL:
# DistributedDataParallel holds the GIL meanwhile, a deadlock. A reference kept here is never dropped.
_left: list[distributed.ProcessGroup | None] = []


def _open_store(launch: Launch) -> distributed.Store:
    """Open the store in which the processes meet; a new one for each restart.

    torchrun's agent keeps its store over restarts, with the addresses of dead processes in it (docs/decisions/015). So it
    only holds the port of our own store, and a port without a listener is that of an earlier start.
    """
    store, _, _ = next(distributed.rendezvous(launch.address, launch.rank, launch.size, timeout=_TIMEOUT))
    store.set_timeout(_TIMEOUT)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    host = os.environ["MASTER_ADDR"]
    if launch.rank == 0:
        new_store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        store.set("vitlab/port", str(new_store.port))
        return new_store
    until = time.monotonic() + _TIMEOUT.total_seconds()
    while True:
        try:
            new_store = distributed.TCPStore(
                host, int(store.get("vitlab/port")), is_master=False, timeout=_CONNECT_TIMEOUT
            )
        except DistError:
            if time.monotonic() > until:
                raise
        else:
            new_store.set_timeout(_TIMEOUT)
            return new_store
