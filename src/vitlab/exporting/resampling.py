"""Resampling as a matrix that the exported graph computes itself, from the size of what comes in.

Runtimes disagree about how a picture or a position table is resized, and few know antialiasing. Products with a matrix mean the
same everywhere. Letters: I places of the result, J places of the source.
"""

import torch
from torch import Tensor

from vitlab.data.rules import Filter
from vitlab.models.spec import GridResize, Pair

_MOST_BITS, _LARGEST_WEIGHT = 22, 2.0**15 - 0.5  # of torch's kernel for bytes, aten/native/cpu/UpSampleKernel.cpp


def picture_matrix(kept: int, new: Tensor, length: int, how: Filter, antialias: bool) -> Tensor:
    """[I, J]: `data.preprocess.scale` of `length` pixels to `new` along one axis; of these, the `kept` in the middle.

    Places are whole multiples of 1 / (2 * new), because OpenVINO has floats of 32 bits only, in which those of a large photo
    would be too coarse for the weights. Where there are 64 bits, the weights are torch's own.
    """
    old, places_J = torch.full((), length, dtype=torch.int64), torch.arange(length)
    middle_I = torch.arange(kept) + (new - kept) // 2
    if how == "area":
        first_IJ = torch.maximum(middle_I[:, None] * old, places_J * new)
        last_IJ = torch.minimum((middle_I[:, None] + 1) * old, (places_J + 1) * new)
        return (last_IJ - first_IJ).clamp(min=0).float() / old.float()
    # The ends too, also where they are cut off: where the filter meets the edge, its weights are the largest.
    at_I = torch.cat([middle_I, torch.zeros(1, dtype=torch.int64), (new - 1).reshape(1)])
    source_I, unit = (2 * at_I + 1) * old - new, 2 * new
    if how == "bilinear" or antialias:  # as Pillow: antialiasing grows with the step, and is cut off at the edge
        width = torch.maximum(unit, 2 * old) if antialias else unit
        away_IJ = (places_J * unit - source_I[:, None]).abs().double() / width.double()
        weights_IJ = _normalised(_cubic(away_IJ, -0.5) if how == "bicubic" else _linear(away_IJ))
        return _in_16_bits(weights_IJ, weights_IJ.amax(dim=(0, 1)))[:kept]
    first_I = (source_I + unit) // unit - 1  # a quotient of what is not negative: not all runtimes round down
    beyond_I = (source_I - first_I * unit).double() / unit.double()
    return _in_16_bits(*_four_taps(first_I.float(), beyond_I, length))[:kept]


def grid_matrices(old: Pair, new: Pair, how: GridResize) -> tuple[Tensor, Tensor]:
    """`models.ops.resize_grid`, down and across, [I, J] each, for any `new`, also one that is not known yet."""
    counts = [torch.full((), cells, dtype=torch.float32) for cells in new]  # tensors: the graph computes with them
    down, across = (_grid_matrix(*each, how) for each in zip(old, new, counts, strict=True))
    if how != "bicubic-offset":
        return down, across
    # The only rule that would change a table that fits: that one is left alone.
    fits = (counts[0] == old[0]) & (counts[1] == old[1])
    return tuple(  # pyright: ignore[reportReturnType] (two of them)
        torch.where(fits, (_places(to)[:, None] == _places(length)).float(), matrix)
        for matrix, length, to in zip((down, across), old, new, strict=True)
    )


def _grid_matrix(old: int, new: int, count: Tensor, how: GridResize) -> Tensor:
    at_I, one = _places(new), torch.ones(())
    if how == "corner-bilinear":
        return _dense(at_I * ((old - 1) / (count - 1).clamp(min=1.0)), old, one)
    scale = old / (count + 0.1) if how == "bicubic-offset" else old / count
    source_I = (at_I + 0.5) * scale - 0.5
    if how == "bilinear":
        return _dense(source_I, old, one)
    if how == "bicubic-antialias":
        return _dense(source_I, old, scale.clamp(min=1.0), cubic=True)
    return _four_taps(source_I.floor(), source_I - source_I.floor(), old)[0]


def _in_16_bits(weights_IJ: Tensor, largest: Tensor) -> Tensor:
    """Rounded to the whole numbers that torch's kernel for bytes multiplies by, as fine as the largest of them allows."""
    # A table: not every runtime's power is exact.
    fine = torch.tensor([2.0**bits for bits in range(_MOST_BITS + 1)], dtype=weights_IJ.dtype)
    fineness = (fine * (largest * fine < _LARGEST_WEIGHT).to(fine.dtype)).amax(dim=0)
    return ((weights_IJ * fineness).round() / fineness).float()


def _normalised(weights_IJ: Tensor) -> Tensor:
    """Rows sum to 1, also at the edges."""
    return weights_IJ / weights_IJ.sum(dim=1, keepdim=True)


def _dense(source_I: Tensor, length: int, width: Tensor, *, cubic: bool = False) -> Tensor:
    """A filter of this width around every source place."""
    away_IJ = ((_places(length) - source_I[:, None]) / width).abs()
    return _normalised(_cubic(away_IJ, -0.5) if cubic else _linear(away_IJ))


def _four_taps(first_I: Tensor, beyond_I: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """torch's bicubic without antialiasing, `beyond_I` behind the place `first_I`: what lies outside is the pixel at the edge.

    And the largest weight, for which torch also takes those at the edge before all of their taps are added.
    """
    weights_IJ = largest = torch.zeros((), dtype=beyond_I.dtype)
    for tap in (-1, 0, 1, 2):
        place_I = (first_I + tap).clamp(min=0.0).minimum(_places(length).amax(dim=0))
        weight_I = _cubic((beyond_I - tap).abs(), -0.75)
        weights_IJ = weights_IJ + weight_I[:, None] * (_places(length) == place_I[:, None]).to(weight_I.dtype)
        largest = torch.maximum(largest, weights_IJ.amax(dim=(0, 1)))
    return weights_IJ, largest


def _linear(away: Tensor) -> Tensor:
    return (1 - away).clamp(min=0.0)


def _cubic(away: Tensor, a: float) -> Tensor:
    """Keys' kernel; Pillow has a = -0.5, torch without antialiasing a = -0.75."""
    near = ((a + 2) * away - (a + 3)) * away * away + 1
    far = ((away - 5) * away + 8) * away * a - 4 * a
    return torch.where(away < 1, near, torch.where(away < 2, far, 0.0))


def _places(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)
