"""Random numbers by key: the same keys give the same numbers on any device.

    u_B3 = uniform(seed, CROP, epoch, ids_B, count=3)

Owns the vectorised form of `runtime.mix` (SplitMix64's finaliser). Integer arithmetic only until the last, exact, step: a GPU
gives the bits of a CPU.
"""

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit numbers, which is what torch multiplies, wrapping round
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 24  # a float32 holds 24 bits exactly, so uniforms need no rounding


def keyed(*keys: int | Tensor) -> Tensor:
    """Hash every combination of the (broadcast) keys to a 64-bit number."""
    device = next((key.device for key in keys if isinstance(key, Tensor)), None)
    state = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        state = state + (key if isinstance(key, Tensor) else _signed(key)) + _STEP
        state = (state ^ shifted(state, 30)) * _FIRST
        state = (state ^ shifted(state, 27)) * _SECOND
        state = state ^ shifted(state, 31)
    return state


def uniform(*keys: int | Tensor, count: int) -> Tensor:
    """Draw `count` numbers in [0, 1) for each combination of keys, [..., count]."""
    return _uniform(keyed(*keys), 0, count)


def normal(*keys: int | Tensor, count: int) -> Tensor:
    """Draw `count` standard normal numbers for each combination of keys (Box-Muller)."""
    u = uniform(*keys, count=2 * count)
    radius = (-2 * (1 - u[..., :count]).log()).sqrt()
    return radius * (2 * torch.pi * u[..., count:]).cos()


def beta(alpha: float, *keys: int | Tensor) -> Tensor:
    """Draw Beta(alpha, alpha) once per key, in double on the CPU (MixUp, CutMix).

    Johnk's way needs a number of tries that depends on luck, so a fixed table of tries is drawn and the first good one taken.
    """
    state = keyed(*(key.cpu() if isinstance(key, Tensor) else key for key in keys))
    drawn, left = torch.empty(state.numel(), dtype=torch.float64), torch.arange(state.numel())
    for start in range(0, _TRIES, _FEW):
        u_Nt = _uniform(state.flatten()[left], 2 * start, 2 * _FEW).double()
        first_Nt, second_Nt = (u_Nt[:, part::2].clamp_min(2**-_BITS).log() / alpha for part in (0, 1))
        top_Nt = torch.logsumexp(torch.stack([first_Nt, second_Nt]), dim=0)
        good_Nt = top_Nt <= 0
        if start + _FEW == _TRIES:
            good_Nt[:, -1] = True
        found_N = good_Nt.any(dim=1)
        chosen_N1 = good_Nt.int().argmax(dim=1, keepdim=True)
        drawn[left[found_N]] = (first_Nt - top_Nt).gather(1, chosen_N1)[found_N, 0].exp()
        left = left[~found_N]
        if not len(left):
            break
    return drawn.view(state.shape)


_FEW = 8  # tries at a time; few keys need more
_TRIES = 64  # one try in two succeeds at alpha = 1, one in six at 2: nothing is left to luck for the alphas people use


def _uniform(state: Tensor, start: int, count: int) -> Tensor:
    """The numbers `start` to `start + count` - 1 of each state."""
    turn = torch.arange(start, start + count, device=state.device)
    return shifted(keyed(state[..., None], turn), 64 - _BITS).float() * 2**-_BITS


def _signed(key: int) -> int:
    return (key + 2**63) % 2**64 - 2**63


def shifted(state: Tensor, by: int) -> Tensor:
    """To the right, as numbers without a sign: torch's own shift drags the sign along."""
    return (state >> by) & (2 ** (64 - by) - 1)
