"""The model in its process, batches split over two threads: its answers, and a thread that fails, hangs or ends the process."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from server_models import EXIT, HANG, RAISE, SIDE
from slow_cases import slow_after

import vitlab
from vitlab.data.decode import read
from vitlab.serving.errors import Refusal
from vitlab.serving.model_process import Answer, ModelProcess
from vitlab.serving.settings import Limits, ModelSettings, Source

START_S = 240.0  # on a machine that is busy with other tests
THREADS = 2


def with_process(settings: ModelSettings, trial: Callable[[ModelProcess], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        process = ModelProcess(settings, Limits(model_seconds=2.0, load_seconds=START_S), lambda: None)
        try:
            await process.start()
            await trial(process)
        finally:
            process.close()

    asyncio.run(run())


async def predict(process: ModelProcess, images: Sequence[bytes]) -> list[Answer]:
    return await process.run(0, "predict", images, [{"top": 1}] * len(images))


def grey(level: int) -> bytes:
    return bytes([level]) * (3 * SIDE * SIDE)


def test_answers_are_those_of_the_model_offline(tmp_path: Path) -> None:
    model = vitlab.create_model("ViT-w32d2m64h2/8", num_classes=5, image_size=SIDE, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    vitlab.save(model, tmp_path / "bundle", labels=tuple("abcde"))
    clf = vitlab.load(tmp_path / "bundle", device="cpu", quiet=True)
    photos_BYXC = torch.randint(
        0, 256, (7, SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    ).numpy()
    decoded = [read(photo_YXC, clf.preprocess).permute(1, 2, 0).numpy().tobytes() for photo_YXC in photos_BYXC]
    expected = [(best.label, pytest.approx(best.p, abs=1e-5)) for (best,) in clf(list(photos_BYXC), top=1)]

    async def trial(process: ModelProcess) -> None:
        for count in (1, 2, 3, 7):
            answers = await predict(process, decoded[:count])
            assert [(top["label"], top["p"]) for _, (top,) in answers] == expected[:count]
            vectors = torch.tensor([found for _, found in await process.run(0, "embed", decoded[:count], [{}] * count)])
            assert torch.allclose(vectors, clf.embed(list(photos_BYXC[:count])), atol=1e-5)

    source = Source("small", str(tmp_path / "bundle"))
    with_process(ModelSettings((source,), "cpu", THREADS), trial)


@pytest.mark.parametrize("place", slow_after(1, [3, 0]))
def test_faults_in_one_thread_are_those_of_the_batch(place: int) -> None:
    """The first images of a batch and the last are computed by different threads."""

    def batch(level: int) -> list[bytes]:
        return [grey(level if number == place else number) for number in range(2 * THREADS)]

    async def back(process: ModelProcess) -> None:
        end = time.monotonic() + START_S
        while not process.ready:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    async def trial(process: ModelProcess) -> None:
        assert await predict(process, batch(RAISE)) == [("refused", "internal")] * 4
        assert [state for state, _ in await predict(process, batch(9))] == ["ok"] * 4 and not process.restarts
        for restarts, level in enumerate((EXIT, HANG), start=1):
            with pytest.raises(Refusal, match="model_lost"):
                await predict(process, batch(level))
            await back(process)
            assert process.restarts == restarts
            assert [state for state, _ in await predict(process, batch(9))] == ["ok"] * 4

    with_process(ModelSettings((Source("split", "split"),), "cpu", THREADS, "server_models:build"), trial)
