"""The parts of a running server, joined: decoders, queue, model process and counters; and the way of one image through them."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vitlab.serving.admission import Room
from vitlab.serving.batching import Batcher
from vitlab.serving.bodies import Body, Memory, Upload
from vitlab.serving.decoding import Decoders, usual_decoders
from vitlab.serving.errors import OF_IMAGES, Refusal
from vitlab.serving.metrics import Metrics
from vitlab.serving.model_process import Kind, ModelProcess
from vitlab.serving.settings import Limits, ModelSettings, ServedModel

_BATCH_ON_CPU, _BATCH_ELSEWHERE = 8, 32
_BATCHES_ADMITTED = 3  # one at work, one behind it, one being decoded
_FEWEST_PLACES = 2


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is wanted, of which model."""

    number: int
    model: ServedModel
    kind: Kind
    wanted: dict[str, Any]


class Service:
    """Made once; `start` loads the models."""

    def __init__(self, settings: ModelSettings, limits: Limits) -> None:
        self.limits, self.metrics = limits.within_system(), Metrics()
        self.draining = False
        self.process = ModelProcess(settings, limits, self._model_is_back)
        self.batcher = Batcher(self.process, limits.max_wait, self.metrics)
        self.room = Room(self.places)
        self.memory = Memory(limits.max_bodies)
        self.decoders: Decoders | None = None

    async def start(self) -> None:
        """Raises what keeps a model from being loaded."""
        self.decoders = await asyncio.get_running_loop().run_in_executor(None, self._start_decoders)
        await self.process.start()

    def _start_decoders(self) -> Decoders:
        limits = self.limits
        count = limits.decoders or usual_decoders()
        return Decoders(count, limits.decode_seconds, limits.decode_memory, self.metrics.decoder_restarts.add)

    def _model_is_back(self) -> None:
        on_cpu = all(model.device == "cpu" for model in self.process.models)
        self.batcher.max_batch = self.limits.max_batch or (_BATCH_ON_CPU if on_cpu else _BATCH_ELSEWHERE)
        self.batcher.pump()

    def close(self) -> None:
        if self.decoders is not None:
            self.decoders.close()
        self.process.close()

    def body(self) -> Body:
        return Body(self.memory, self.limits)

    @property
    def ready(self) -> bool:
        return self.process.ready and not self.draining

    def places(self) -> int:
        """Images that may be admitted and not yet answered: some batches, or fewer where these would take too long."""
        most = self.limits.max_queue or _BATCHES_ADMITTED * self.batcher.max_batch
        seconds = self.batcher.seconds_per_batch
        if not seconds:
            return most
        in_time = int(self.limits.queue_seconds / seconds * self.batcher.max_batch)
        return min(most, max(_FEWEST_PLACES, in_time))

    def model(self, name: str | None) -> tuple[int, ServedModel]:
        """By its name; the first where none is given."""
        for number, model in enumerate(self.process.models):
            if name is None or model.name == name:
                return number, model
        raise Refusal("unknown_model" if self.process.models else "not_ready")

    async def answer(self, ask: Ask, uploads: Sequence[Upload]) -> list[Any]:
        """For each upload what the model says, or the `Refusal` of that image."""
        deadline = asyncio.get_running_loop().time() + self.limits.deadline
        places = self.room.take(len(uploads))
        started = time.perf_counter()
        try:
            async with asyncio.timeout_at(deadline):
                return await _each(uploads, places, lambda upload: self._one(ask, upload, deadline))
        except TimeoutError:
            raise Refusal("deadline") from None
        finally:
            self.room.give_back(places)
            self.metrics.request_seconds.observe(time.perf_counter() - started)

    async def _one(self, ask: Ask, upload: Upload, deadline: float) -> Any:
        assert self.decoders is not None
        try:
            image = await self.decoders.decode(upload.data, ask.model.preprocess, whole=ask.kind == "explain")
            upload.data = b""  # the file is not needed any more
            found = await self.batcher.submit((ask.number, ask.kind), image, ask.wanted, deadline)
        except Refusal as refusal:
            if refusal.code not in OF_IMAGES:
                raise
            self.metrics.refused_images.add(f'code="{refusal.code}"')
            return refusal
        self.metrics.images.add(f'kind="{ask.kind}",model="{ask.model.name}"')
        return found

    def gauges(self) -> dict[str, tuple[str, float]]:
        return {
            "vitlab_ready": ("1 when requests are admitted.", float(self.ready)),
            "vitlab_queue_images": ("Images that wait for the model.", self.batcher.waiting),
            "vitlab_admitted_images": ("Images admitted and not yet answered.", self.room.taken),
            "vitlab_admission_limit_images": ("The most of these.", self.places()),
            "vitlab_body_bytes": ("Bodies of requests in memory.", self.memory.bytes),
            "vitlab_model_restarts_total": ("How often the model process was started again.", self.process.restarts),
        }


async def _each(uploads: Sequence[Upload], lanes: int, one: Callable[[Upload], Awaitable[Any]]) -> list[Any]:
    """`one` of every upload, `lanes` at a time, in their order."""
    if len(uploads) == 1:
        return [await one(uploads[0])]
    found: list[Any] = [None] * len(uploads)
    left = iter(range(len(uploads)))

    async def lane() -> None:
        for number in left:
            found[number] = await one(uploads[number])

    tasks = [asyncio.ensure_future(lane()) for _ in range(lanes)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return found
