"""A batch split over threads: the same answers in the same order, whatever the number of images, and errors are not lost."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.data.rules import Preprocess
from vitlab.engines import inference
from vitlab.engines.inference import infer_pixels, split_over_threads

SIZE = 32
RULE = Preprocess(image_size=(SIZE, SIZE))
CPU = torch.device("cpu")
WAIT_S = 60


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Generator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model = vitlab.create_model("ViT-w32d2m64h2/8", num_classes=5, image_size=SIZE, seed=0).eval()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


def pixels(count: int) -> Tensor:
    return torch.randint(
        0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )


def in_one_thread(function: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 31])
def test_answers_are_those_of_one_thread_in_their_order(threads: int, model: torch.nn.Module, count: int) -> None:
    found_BK = infer_pixels(model, pixels(count), RULE, CPU, count)
    expected_BK = in_one_thread(lambda: infer_pixels(model, pixels(count), RULE, CPU, count))
    torch.set_num_threads(threads)
    assert torch.allclose(found_BK, expected_BK, atol=1e-5)
    assert count == 1 or not torch.allclose(expected_BK[0], expected_BK[1], atol=1e-2), "images differ"
    assert torch.equal(found_BK, infer_pixels(model, pixels(count), RULE, CPU, count)), "the same bits every time"


def test_each_thread_computes_its_images_alone_and_all_at_once(threads: int) -> None:
    all_there, seen = threading.Barrier(threads), list[tuple[int, int, bool]]()

    def function(x_BCYX: Tensor) -> Tensor:
        all_there.wait(WAIT_S)
        seen.append((len(x_BCYX), torch.get_num_threads(), torch.is_inference_mode_enabled()))
        return x_BCYX.flatten(1)

    x_BCYX = torch.rand(2 * threads, 1, 2, 2)
    assert torch.equal(split_over_threads(function, x_BCYX), x_BCYX.flatten(1))
    assert seen == [(2, 1, True)] * threads
    with ThreadPoolExecutor(1) as pool:
        assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == threads, "for all other work"


def test_large_batches_are_computed_in_parts_that_stay_in_the_cache(threads: int) -> None:
    sizes = list[int]()

    def function(x_BCYX: Tensor) -> Tensor:
        sizes.append(len(x_BCYX))
        return x_BCYX.flatten(1)

    x_BCYX = torch.rand(20 * threads + 1, 1, 2, 2)
    assert torch.equal(split_over_threads(function, x_BCYX), x_BCYX.flatten(1))
    assert max(sizes) == inference._TOGETHER and sum(sizes) == len(x_BCYX) and sizes[-1] == 1


def test_error_in_one_thread_fails_the_batch_and_not_the_next(threads: int) -> None:
    def function(x_BCYX: Tensor) -> Tensor:
        if (x_BCYX == 0).any():
            raise MemoryError("too many")
        return x_BCYX.flatten(1)

    x_BCYX = torch.ones(2 * threads, 1, 2, 2)
    for bad in range(len(x_BCYX)):
        with pytest.raises(MemoryError, match="too many"):
            split_over_threads(function, x_BCYX.index_fill(0, torch.tensor([bad]), 0))
        assert torch.equal(split_over_threads(function, x_BCYX), x_BCYX.flatten(1))


def test_runtimes_with_threads_of_their_own_and_autocast_get_whole_batches(
    threads: int, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_be_called(*_: object) -> Tensor:
        raise AssertionError("split")

    monkeypatch.setattr(inference, "split_over_threads", must_not_be_called)
    images_BCYX = pixels(2 * threads)
    assert len(infer_pixels(lambda x_BCYX: x_BCYX.flatten(1), images_BCYX, RULE, CPU)) == 2 * threads
    batches = [inference._loose_batch(images_BCYX)]
    list(inference.infer(model, batches, RULE, CPU, torch.autocast("cpu", torch.bfloat16)))
    with pytest.raises(AssertionError, match="split"):
        infer_pixels(model, images_BCYX, RULE, CPU)
