"""Randomness depends on its keys alone, and a device that is not there is an error."""

from collections.abc import Generator

import pytest
import torch

from vitlab.core import runtime
from vitlab.core.errors import UsageError

GOLDEN_MIX = [8147104208329303767, 6804074658870690613, 8825289091277911490]


@pytest.fixture
def torch_settings() -> Generator[None]:
    """Puts back what `prepare` changes for the whole process."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def test_mix_distinguishes_order_count_and_neighbouring_keys() -> None:
    keys = [(), (0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (2**63,)]
    assert len({runtime.mix(*key) for key in keys}) == len(keys)


def test_mix_gives_seeds_that_torch_accepts_and_that_look_random() -> None:
    seeds = [runtime.mix(0, step) for step in range(4096)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert abs(ones - 2048) < 5 * 32, f"bit {bit} is not fair"  # five standard deviations


def test_mix_never_changes() -> None:
    assert [runtime.mix(*keys) for keys in [(0,), (1, 2), (0, 1, 2)]] == GOLDEN_MIX


def test_generator_depends_on_its_keys_and_on_nothing_drawn_before() -> None:
    first = torch.rand(4, generator=runtime.generator(3, 5))
    torch.rand(100)
    assert torch.equal(torch.rand(4, generator=runtime.generator(3, 5)), first)
    assert not torch.equal(torch.rand(4, generator=runtime.generator(3, 6)), first)


@pytest.mark.parametrize("name", ["gpu", "", "cpu:-1", "cuda:99999999999", "cpu:1:1"])
def test_text_that_is_not_a_device_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(UsageError, match=r"device\n.*cpu"):
        runtime.pick_device(name)


@pytest.mark.parametrize("name", ["meta", "xla"])
def test_absent_device_is_refused_and_never_replaced(name: str) -> None:
    with pytest.raises(UsageError, match="not available"):
        runtime.pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'cuda:0' is not available\n"):
        runtime.pick_device("cuda:0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(UsageError, match="this machine has"):
        runtime.pick_device(f"cuda:{torch.cuda.device_count()}")


def test_auto_is_the_best_device_present() -> None:
    assert runtime.pick_device("auto").type == runtime.available_devices()[0]
    assert runtime.available_devices()[-1] == "cpu"


@pytest.mark.usefixtures("torch_settings")
def test_prepare_sets_threads_seed_and_determinism() -> None:
    ready = runtime.prepare("cpu", seed=7, threads=1)
    assert (ready.device.type, ready.seed, ready.threads) == ("cpu", 7, 1)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    drawn = torch.rand(3)
    runtime.prepare("cpu", seed=7)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("threads", [0, -1])
def test_prepare_refuses_fewer_than_one_thread(threads: int) -> None:
    with pytest.raises(UsageError, match="--threads"):
        runtime.prepare("cpu", threads=threads)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("seed", [2**64, -(2**64)])
def test_prepare_refuses_a_seed_beyond_64_bits(seed: int) -> None:
    with pytest.raises(UsageError, match="seed"):
        runtime.prepare("cpu", seed=seed)
