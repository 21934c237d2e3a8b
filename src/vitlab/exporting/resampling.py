"""Resampling as a matrix that the exported graph computes itself, from the size of what comes in.

Runtimes disagree about how a picture or a position table is resized, and few know antialiasing. Products with a matrix mean the
same everywhere. Letters: I places of the result, J places of the source.
"""

import torch
from torch import Tensor

from vitlab.data.rules import Filter
from vitlab.models.spec import GridResize, Pair


def picture_matrix(at_I: Tensor, scale: Tensor, length: int, how: Filter, antialias: bool) -> Tensor:
    """[I, J]: `data.preprocess.scale` along one axis. `scale` is old / new, `at_I` which of the new pixels are wanted."""
    if how == "area":
        return _coverage(at_I * scale, (at_I + 1) * scale, length)
    source_I = (at_I + 0.5) * scale - 0.5
    if antialias:  # as Pillow: the filter grows with the step, and is cut off at the edge
        return _in_16_bits(_dense(source_I, length, scale.clamp(min=1.0), cubic=how == "bicubic"))
    one = torch.ones_like(scale)
    return _in_16_bits(_dense(source_I, length, one) if how == "bilinear" else _four_taps(source_I, length))


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
    return _four_taps(source_I, old)


def _in_16_bits(weights_IJ: Tensor) -> Tensor:
    """Rounded to the whole numbers that torch's kernel for bytes multiplies by, as fine as the largest weight allows."""
    fineness = 2.0 ** ((2**15 - 0.5) / weights_IJ.amax(dim=(0, 1))).log2().floor()
    return (weights_IJ * fineness).round() / fineness


def _dense(source_I: Tensor, length: int, width: Tensor, *, cubic: bool = False) -> Tensor:
    """A filter of this width around every source place; rows sum to 1, also at the edges."""
    away_IJ = ((_places(length) - source_I[:, None]) / width).abs()
    weights_IJ = _cubic(away_IJ, -0.5) if cubic else (1 - away_IJ).clamp(min=0.0)
    return weights_IJ / weights_IJ.sum(dim=1, keepdim=True)


def _four_taps(source_I: Tensor, length: int) -> Tensor:
    """torch's bicubic without antialiasing: what lies outside is the pixel at the edge."""
    first_I = source_I.floor()
    weights_IJ = torch.zeros(())
    for tap in (-1, 0, 1, 2):
        place_I = (first_I + tap).clamp(min=0.0).minimum(_places(length).amax(dim=0))
        weight_I = _cubic((source_I - first_I - tap).abs(), -0.75)
        weights_IJ = weights_IJ + weight_I[:, None] * (_places(length) == place_I[:, None]).float()
    return weights_IJ


def _cubic(away: Tensor, a: float) -> Tensor:
    """Keys' kernel; Pillow has a = -0.5, torch without antialiasing a = -0.75."""
    near = ((a + 2) * away - (a + 3)) * away * away + 1
    far = ((away - 5) * away + 8) * away * a - 4 * a
    return torch.where(away < 1, near, torch.where(away < 2, far, 0.0))


def _coverage(first_I: Tensor, last_I: Tensor, length: int) -> Tensor:
    """The share of each old pixel in each new one."""
    places_J = _places(length)
    overlap_IJ = (torch.minimum(last_I[:, None], places_J + 1) - torch.maximum(first_I[:, None], places_J)).clamp(
        min=0.0
    )
    return overlap_IJ / overlap_IJ.sum(dim=1, keepdim=True)


def _places(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)
