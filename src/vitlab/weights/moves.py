"""Reversible layout changes between foreign arrays and our tensors.

Owns permutations and reshapes only; no value is ever computed, so every round trip is bit-exact.
Letters: D width, H heads, Dh head width, I inputs, O outputs, Y X kernel rows and columns, C channels.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Move:
    """`inward` maps their arrays to our tensor, `outward` back."""

    inward: Callable[[Sequence[Tensor]], Tensor]
    outward: Callable[[Tensor], Sequence[Tensor]]


def one(inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor]) -> Move:
    """A move between one array and one tensor."""
    return Move(lambda arrays: inward(arrays[0]), lambda tensor: (outward(tensor),))


SAME = one(lambda array: array, lambda tensor: tensor)
DENSE = one(lambda array: array.T, lambda tensor: tensor.T)  # flax stores [in, out], torch [out, in]
CONV = one(lambda array: array.permute(3, 2, 0, 1), lambda tensor: tensor.permute(2, 3, 1, 0))  # HWIO <-> OIHW
CONV_HEAD = one(lambda array: array[0, 0].T, lambda tensor: tensor.T[None, None])  # BiT's head is a 1x1 convolution
FOUR_AXES = one(torch.flatten, lambda tensor: tensor.reshape(1, 1, 1, -1))  # GroupNorm in old hybrid files
JOINED = Move(lambda arrays: torch.cat(list(arrays)), lambda tensor: tensor.chunk(3))  # q, k and v kept apart


def heads_in(heads: int, parts: int) -> Move:
    """`parts` kernels [D, H, Dh] side by side <-> one matrix [parts·D, D]."""

    def inward(arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat([array.flatten(1).T for array in arrays])

    def outward(tensor: Tensor) -> Sequence[Tensor]:
        return [part.T.unflatten(1, (heads, -1)) for part in tensor.chunk(parts)]

    return Move(inward, outward)


def heads_bias(heads: int, parts: int) -> Move:
    """`parts` biases [H, Dh] <-> one vector [parts·D]."""

    def inward(arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat([array.flatten() for array in arrays])

    def outward(tensor: Tensor) -> Sequence[Tensor]:
        return [part.unflatten(0, (heads, -1)) for part in tensor.chunk(parts)]

    return Move(inward, outward)


def heads_out(heads: int) -> Move:
    """A kernel [H, Dh, D] <-> the matrix [D, D]."""
    return one(lambda array: array.flatten(0, 1).T, lambda tensor: tensor.T.unflatten(0, (heads, -1)))
