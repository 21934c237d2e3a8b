"""Device, threads, seeds and determinism: set once, here, before any work.

Model code never asks what it runs on. Randomness is keyed by (seed, step, ...) through `mix`, not by how much was drawn
before, so that a resumed run and a run with other workers draw the same numbers.
"""

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Generator
from typing import TypeVar, cast

import torch

from vitlab.core.errors import UsageError, amount

OptimizerKind = TypeVar("OptimizerKind", bound=type[torch.optim.Optimizer])
_MOST_THREADS = 1024  # torch creates them all at once, and the process aborts where that fails


@dataclasses.dataclass(frozen=True)
class Runtime:
    device: torch.device
    seed: int
    threads: int


def prepare(device: str = "auto", seed: int = 0, threads: int | None = None) -> Runtime:
    """Set up device, seed, threads and deterministic mode."""
    require_threads(threads)
    if threads is not None:
        torch.set_num_threads(threads)
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be a whole number from 0 to 2^63-1, not {seed}")
    # cuBLAS reads this when it starts; without it deterministic mode refuses to run on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As `use_deterministic_algorithms(True)`, which would also load a compiler, for a third of a command's start.
    torch.set_deterministic_debug_mode("error")
    # It would also fill every new tensor, in case uninitialised values are read: one more kernel for each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(seed)
    return Runtime(device=pick_device(device), seed=seed, threads=torch.get_num_threads())


def require_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise UsageError(f"--threads must be at least 1 and at most {_MOST_THREADS:,}, not {threads}")


@contextlib.contextmanager
def restored_torch_globals() -> Generator[None]:
    """Restore at the end what `prepare` sets for the process."""
    threads, strict, filled, noise = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        torch.get_rng_state(),
    )
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(strict)
        if "torch._inductor" in sys.modules:  # the compiler is loaded, and has the setting as well
            torch.use_deterministic_algorithms(strict > 0, warn_only=strict == 1)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_rng_state(noise)


def pick_device(name: str = "auto") -> torch.device:
    """The best device present, or `name`; raises if that is absent."""
    available = available_devices()
    if name == "auto":
        return torch.device(available[0])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"'{name}' is not a device", hint=f"Available here: {', '.join(available)}.") from None
    if device.type not in available:
        raise UsageError(f"device '{name}' is not available", hint=f"Available here: {', '.join(available)}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"there is no {name}: this machine has {amount(torch.cuda.device_count(), 'GPU')}")
    return device


def available_devices() -> list[str]:
    """Best first."""
    found = ["cuda"] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a GPU or the machine has no memory left."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "can't allocate memory" in str(error)  # the CPU's has no type of its own


def seed_noise(number: int, device: torch.device) -> None:
    """As `torch.manual_seed`, without its cost on every step."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    elif device.type == "mps":
        torch.mps.manual_seed(number)


def eager(kind: OptimizerKind) -> OptimizerKind:
    """The same optimiser, for use outside compiled functions only.

    torch wraps these methods to hide them from its compiler, and loads all of that to do so: as long as torch itself takes.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return cast("OptimizerKind", type(kind.__name__, (kind,), methods))


def mix(*keys: int) -> int:
    """Mix integers into one 63-bit seed (SplitMix64's finaliser)."""
    state = 0
    for key in keys:
        state = (state + key + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def generator(*keys: int) -> torch.Generator:
    """A CPU generator that depends on the keys alone."""
    return torch.Generator().manual_seed(mix(*keys))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device does it itself; elsewhere it would be emulated, slowly."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
