"""Dynamic batching: images wait until the model can take them, and those that wait together go together.

A batch starts as soon as the model is idle; while it is busy, the next one fills. A full one is sent ahead, so that the model
never waits for the front. Nobody waits for company unless `max_wait` says so.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from vitlab.serving.errors import Refusal
from vitlab.serving.metrics import Metrics
from vitlab.serving.model_process import Answer, Kind

_AHEAD = 2  # batches that the model has at a time: one at work, one behind it
_SMOOTHING = 0.2  # of the measured speed, for each batch
Key = tuple[int, Kind]


class Model(Protocol):
    """What runs a batch: `ModelProcess`."""

    ready: bool

    async def run(
        self, model: int, kind: Kind, images: Sequence[bytes], wanted: Sequence[dict[str, Any]]
    ) -> list[Answer]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    image: bytes
    wanted: dict[str, Any]
    since: float
    deadline: float
    answer: "asyncio.Future[Any]"


class Batcher:
    """The queue before the model."""

    def __init__(self, model: Model, max_wait: float, metrics: Metrics) -> None:
        self.max_batch = 1  # until the model has said where it runs
        self.seconds_per_batch: float | None = None  # of late
        self._model, self._max_wait, self._metrics = model, max_wait, metrics
        self._queues: dict[Key, collections.deque[_Work]] = collections.defaultdict(collections.deque)
        self._at_work: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_done = 0.0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def submit(self, key: Key, image: bytes, wanted: dict[str, Any], deadline: float) -> Any:
        """The answer to one image. Whoever is cancelled while waiting is not computed, nor is what comes too late."""
        loop = asyncio.get_running_loop()
        work = _Work(image, wanted, loop.time(), deadline, loop.create_future())
        self._queues[key].append(work)
        self.pump()
        return await work.answer

    def pump(self) -> None:
        """Send what can be sent: after every arrival, every answer, and when the model is back."""
        while self._model.ready and (key := self._next()) is not None:
            queue = self._queues[key]
            most = 1 if key[1] == "explain" else self.max_batch
            works = [queue.popleft() for _ in range(min(most, len(queue)))]
            task = asyncio.get_running_loop().create_task(self._run(key, works))
            self._at_work.add(task)
            task.add_done_callback(self._done)

    def _next(self) -> Key | None:
        """The queue whose first image has waited longest, if it is time for a batch of it."""
        now = asyncio.get_running_loop().time()
        heads = [(queue[0].since, key) for key, queue in self._queues.items() if self._without_dead(queue, now)]
        if not heads or len(self._at_work) >= _AHEAD:
            return None
        since, key = min(heads)
        if len(self._queues[key]) >= self.max_batch:
            return key
        if self._at_work:
            return None
        if now < since + self._max_wait:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_at(since + self._max_wait, self._waited)
            return None
        return key

    def _without_dead(self, queue: collections.deque[_Work], now: float) -> bool:
        """Drop what was cancelled or is late; whether anything is left."""
        alive = [work for work in queue if not work.answer.done() and work.deadline > now]
        if len(alive) < len(queue):
            for work in queue:
                if not work.answer.done() and work.deadline <= now:
                    work.answer.set_exception(Refusal("deadline"))
                elif work.answer.cancelled():
                    self._metrics.cancelled.add()
            queue.clear()
            queue.extend(alive)
        return bool(queue)

    def _waited(self) -> None:
        self._timer = None
        self.pump()

    async def _run(self, key: Key, works: list[_Work]) -> None:
        started = time.perf_counter()
        try:
            answers = await self._model.run(*key, [work.image for work in works], [work.wanted for work in works])
        except Refusal as refusal:
            answers: list[Answer] = [("refused", refusal.code)] * len(works)
        else:
            self._measure(len(works), started)
        for work, (state, found) in zip(works, answers, strict=True):
            if work.answer.done():
                continue
            if state == "ok":
                work.answer.set_result(found)
            else:
                work.answer.set_exception(Refusal(found))

    def _measure(self, images: int, started: float) -> None:
        """Of a batch that was sent ahead, only the time since the one before it is its own."""
        now = time.perf_counter()
        seconds = now - max(started, self._last_done)
        self._last_done = now
        self._metrics.batch_size.observe(images)
        self._metrics.batch_seconds.observe(seconds)
        before = self.seconds_per_batch
        self.seconds_per_batch = seconds if before is None else before + _SMOOTHING * (seconds - before)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._at_work.discard(task)
        self.pump()
