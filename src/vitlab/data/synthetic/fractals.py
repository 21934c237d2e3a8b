"""Fractal images: pre-training data without files, by (seed, category, instance).

A category is an iterated function system: 2 to 7 contractions of the plane, whose attractor is the picture (Kataoka et al.,
arXiv 2101.08515). Every float operation is one addition, multiplication or division of two tensors, never a fused, summed or
transcendental one: IEEE 754 fixes their results, so that a GPU draws the bytes of a CPU, and a batch those of single images.
Letters: B images, C channels, M maps, W words of all images, K points in a word, P pixels, Y X rows and columns. A map is two
rows of three: (x, y) goes to (a x + b y + e, c x + d y + f).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.draws import uniform
from vitlab.core.errors import UsageError, require_choice
from vitlab.data.synthetic.settings import CHANNELS, FractalSettings, Mode, require_fractal_size, require_indices

_SEARCH, _INSTANCE, _SPREAD, _PALETTE = range(4)  # keep the uses of one seed apart
_MAPS = 7  # as published
_SIGMA_LIMIT = 5 / 6  # an instance may stretch a map by 1.2, and must still contract
_FILL = 0.2  # the published threshold
_FILL_SIZE = (64, 64)  # coarse, so that thin curves count: on a fine grid only shapeless clouds would pass
_TRIES = 4  # candidates per category and round; about two are needed, and the result does not depend on it
_FINE_SIDE = 256  # of the grid for drawing, at least; published sets are drawn at 512 and shrunk for training
_POINTS = 100_000 / 512**2  # per pixel of the fine grid, as published
_MARGIN = 6 / 512  # of the side, as published
_INNER = 64  # points in each leaf
_LEAF_SHARE = 3.0  # words end below this many leaves' share of the points; the ends then have one leaf's on the average
_DEPTH_LIMIT = 32  # maps in a word: some systems have one map that is almost all of them
_STRETCH = 0.2  # coefficients of an instance are 0.8 to 1.2 times those of its category, as published
_DIMMEST = 64  # of 255: a colour must be seen against black
_CHUNK_CELLS = {"cpu": 2**20, "cuda": 2**26}  # of the fine grid at once: what the caches, or the memory, hold with ease

_found: dict[tuple[int, int], Tensor] = {}  # maps by (seed, category): 21,000 are a few megabytes, and seconds to find


@dataclasses.dataclass(frozen=True)
class Fractals(FractalSettings):
    """The images of a set of fractals, and their categories."""

    @functools.cached_property
    def labels(self) -> Tensor:
        return torch.arange(len(self)) % self.categories

    def render(self, indices_B: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The images at `indices_B`, uint8 [B, C, Y, X]."""
        require_indices(indices_B.tolist(), len(self))
        instances_B = indices_B // self.categories
        return draw_fractals(self.seed, indices_B % self.categories, instances_B, self.image_size, self.mode, device)


def draw_fractals(
    seed: int,
    categories_B: Tensor,
    instances_B: Tensor,
    image_size: tuple[int, int],
    mode: Mode = "grey",
    device: torch.device | str = "cpu",
) -> Tensor:
    """Images uint8 [B, C, Y, X], with one channel for `grey` and three for `colour`.

    Instance 0 is the category itself. The others have one coefficient changed by up to a fifth, and are mirrored, as published,
    or turned by 90 degrees. Each has its own dot, 3x3 pixels of the fine grid of which some are set, and in colour its own
    palette, with one colour for each map.
    """
    require_choice("mode", mode, tuple(CHANNELS))
    require_fractal_size(image_size)
    if categories_B.shape != instances_B.shape or categories_B.dim() != 1:
        raise UsageError(f"{list(categories_B.shape)} categories and {list(instances_B.shape)} instances do not match")
    device = torch.device(device)
    maps = find_systems(seed, categories_B).to(device)
    categories_B, instances_B = categories_B.to(device), instances_B.to(device)
    factor = _fine_factor(image_size)
    fine = image_size[0] * factor, image_size[1] * factor
    out = torch.empty(len(categories_B), CHANNELS[mode], *image_size, dtype=torch.uint8, device=device)
    chunk = max(1, _CHUNK_CELLS.get(device.type, _CHUNK_CELLS["cpu"]) // math.prod(fine))
    for start in range(0, len(out), chunk):
        keys_B = categories_B[start : start + chunk], instances_B[start : start + chunk]
        level_BYX = _draw(seed, maps[:, :, start : start + chunk], *keys_B, fine, mode)
        palette_B3M = None if mode == "grey" else _palettes(seed, *keys_B)
        out[start : start + chunk] = _shrunk(level_BYX, palette_B3M, factor)
    return out


def find_systems(seed: int, categories_B: Tensor) -> Tensor:
    """The maps of each category, float32 [2, 3, B, 7] on the CPU, zero if unused.

    Candidate k of a category depends on (seed, category, k) alone, and the first that fills enough of the image is taken and
    kept.
    """
    wanted = categories_B.tolist()
    if wanted and min(wanted) < 0:
        raise UsageError(f"categories are numbered from 0, not {min(wanted)}")
    missing = torch.tensor(
        sorted({category for category in wanted if (seed, category) not in _found}), dtype=torch.int64
    )
    first = 0
    while len(missing):
        tries = torch.arange(first, first + _TRIES)
        maps = _candidates(seed, missing.repeat_interleave(_TRIES), tries.repeat(len(missing)))
        good = (_fill_rates(maps) >= _FILL).view(-1, _TRIES)
        chosen = good.int().argmax(dim=1) + torch.arange(len(missing)) * _TRIES
        for row in good.any(dim=1).nonzero()[:, 0].tolist():
            _found[seed, int(missing[row])] = maps[:, :, int(chosen[row])].clone()
        missing = missing[~good.any(dim=1)]
        first += _TRIES
    rows = [_found[seed, category] for category in wanted]
    return torch.stack(rows, dim=2) if rows else torch.empty(2, 3, 0, _MAPS)


def _candidates(seed: int, categories_B: Tensor, tries_B: Tensor) -> Tensor:
    """Random contractions [2, 3, B, 7], most of them neither dust nor a cloud.

    Anderson & Farrell (arXiv 2110.03091) found that looks follow the sum of (larger + 2 * smaller) singular values, good
    between (5 + n) / 2 and (6 + n) / 2 for n maps. Drawn so, half of them fill enough.
    """
    u_BD = uniform(seed, _SEARCH, categories_B, tries_B, count=8 * _MAPS + 2)
    u_BM8, count_B = u_BD[:, 2:].view(-1, _MAPS, 8), 2 + (u_BD[:, 0] * (_MAPS - 1)).long()
    used_BM = torch.arange(_MAPS) < count_B[:, None]
    larger_BM = torch.maximum(u_BM8[..., 0], u_BM8[..., 1]) * used_BM
    smaller_BM = torch.minimum(u_BM8[..., 0], u_BM8[..., 1]) * used_BM
    total_B = _sum_in_order(larger_BM + 2 * smaller_BM)
    scale_B1 = ((5 + count_B + u_BD[:, 1]) / 2 / total_B)[:, None]
    larger_BM, smaller_BM = ((sigma * scale_B1).clamp_max(_SIGMA_LIMIT) for sigma in (larger_BM, smaller_BM))
    signed_BM8 = u_BM8 * 2 - 1
    (cos, sin), (cos2, sin2) = (_quarter_turn(signed_BM8[..., i]) for i in (2, 3))
    flip, flip2 = (torch.where(signed_BM8[..., i] < 0, -1.0, 1.0) for i in (4, 5))
    maps = torch.zeros(2, 3, len(categories_B), _MAPS)
    maps[0, 0] = (larger_BM * cos * cos2 - smaller_BM * sin * sin2) * flip
    maps[0, 1] = (larger_BM * cos * sin2 + smaller_BM * sin * cos2) * flip2
    maps[1, 0] = (larger_BM * sin * cos2 + smaller_BM * cos * sin2) * flip
    maps[1, 1] = (larger_BM * sin * sin2 - smaller_BM * cos * cos2) * flip2
    maps[:, 2] = signed_BM8[..., 6:].permute(2, 0, 1) * used_BM
    return maps


def _quarter_turn(t: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of -90 to 90 degrees for t from -1 to 1, by exact arithmetic."""
    return (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)


def _fill_rates(maps: Tensor) -> Tensor:
    """The share of a coarse grid that an attractor touches, float32 [B]."""
    rates: list[Tensor] = []
    spread_1K = (torch.arange(_INNER) + 0.5)[None] / _INNER
    upright = torch.zeros(maps.shape[2], dtype=torch.int64)
    for part in maps.split(_CHUNK_CELLS["cpu"] // math.prod(_FILL_SIZE), dim=2):
        words = _words(part, (2 * _FILL_SIZE[0], 2 * _FILL_SIZE[1]))
        batch, cells = part.shape[2], math.prod(_FILL_SIZE)
        flat_WK = _pixels(words, spread_1K.expand(batch, -1), upright, _FILL_SIZE, margin=0)
        flat_WK += words.image[:, None] * cells
        touched = torch.zeros(batch * cells).index_fill_(0, flat_WK.view(-1), 1.0)
        rates.append(touched.view(batch, cells).sum(dim=1) / cells)
    return torch.cat(rates)


# --- drawing ----------------------------------------------------------------------------------------------------------


class Words(NamedTuple):
    """Compositions of maps: `affine` [2, 3, W], their image [W] and outermost map [W]."""

    affine: Tensor
    image: Tensor
    first: Tensor


def _draw(
    seed: int, maps: Tensor, categories_B: Tensor, instances_B: Tensor, fine: tuple[int, int], mode: Mode
) -> Tensor:
    """Levels uint8 [B, Y, X] on the fine grid: 0, else 1, or 1 + the outermost map."""
    u_B4 = uniform(seed, _INSTANCE, categories_B, instances_B, count=4)
    changed_B = instances_B > 0
    words = _words(_stretched(maps, u_B4[:, 0], u_B4[:, 1], changed_B), fine)
    jitter_BK = uniform(seed, _SPREAD, categories_B, instances_B, count=_INNER)
    spread_BK = (torch.arange(_INNER, device=maps.device) + jitter_BK) / _INNER
    margin = max(2, round(min(fine) * _MARGIN))
    flat_WK = _pixels(words, spread_BK, (u_B4[:, 2] * 8).long() * changed_B, fine, margin)
    level_W = torch.ones_like(words.first) if mode == "grey" else words.first + 1
    dots_B = 1 + (u_B4[:, 3] * (2**9 - 1)).long()  # any of the 511 dots that are not empty
    return _stamped(flat_WK, level_W, words.image, dots_B, fine)


def _palettes(seed: int, categories_B: Tensor, instances_B: Tensor) -> Tensor:
    """Seven colours for each image, int64 [B, 3, M]."""
    u_B3M = uniform(seed, _PALETTE, categories_B, instances_B, count=3 * _MAPS).view(-1, 3, _MAPS)
    return (_DIMMEST + u_B3M * (256 - _DIMMEST)).long()


def _stretched(maps: Tensor, which_B: Tensor, by_B: Tensor, changed_B: Tensor) -> Tensor:
    """One of the six coefficients, the same in all maps of a system, times 0.8 to 1.2."""
    factor_B = torch.where(changed_B, 1 - _STRETCH + 2 * _STRETCH * by_B, 1.0)
    chosen_6B = (which_B * 6).long() == torch.arange(6, device=maps.device)[:, None]
    return maps * torch.where(chosen_6B, factor_B, 1.0).view(2, 3, -1, 1)


def _words(maps: Tensor, size: tuple[int, int]) -> Words:
    """All compositions of maps whose share of the attractor has fallen to a leaf's.

    A map's share is its determinant's, as published for the chaos game, and a word's the product of its maps'. The game draws
    words by chance, and leaves holes and clumps; the whole tree has none, and costs one composition for each leaf.
    """
    det_BM = (maps[0, 0] * maps[1, 1] - maps[0, 1] * maps[1, 0]).abs()
    shares_BM = det_BM / _sum_in_order(det_BM)[:, None]
    used_BM, limit = shares_BM > 0, _LEAF_SHARE * _INNER / (_POINTS * math.prod(size))
    table = torch.cat([maps.flatten(0, 1), shares_BM[None]]).flatten(1)
    # Nine rows for each word: six coefficients, share, image, outermost map. One array, because each gather has its price.
    nodes = torch.zeros(9, len(shares_BM), device=maps.device)
    nodes[0] = nodes[4] = nodes[6] = 1
    nodes[7] = torch.arange(len(shares_BM), device=maps.device)
    leaves: list[Tensor] = []
    for depth in range(_DEPTH_LIMIT):
        done = nodes[6] <= limit
        leaves.append(nodes.index_select(1, done.nonzero()[:, 0]))
        nodes = nodes.index_select(1, (~done).nonzero()[:, 0])
        if not nodes.shape[1]:
            break
        parent, child = used_BM.index_select(0, nodes[7].long()).nonzero().unbind(dim=1)
        nodes = nodes.index_select(1, parent)
        inner = table.index_select(1, nodes[7].long() * _MAPS + child)
        outer = nodes[:6].view(2, 3, -1)
        affine = outer[:, :1] * inner[None, :3] + outer[:, 1:2] * inner[None, 3:6]
        affine[:, 2] += outer[:, 2]
        nodes[:6] = affine.flatten(0, 1)
        nodes[6] *= inner[6]
        nodes[8] = nodes[8] if depth else child
    leaves.append(nodes)
    words = torch.cat(leaves, dim=1)
    words = words.index_select(1, words[7].sort(stable=True).indices)
    return Words(words[:6].view(2, 3, -1), words[7].long(), words[8].to(torch.uint8))


def _turned(maps: Tensor, symmetry_B: Tensor) -> Tensor:
    """Rows under one of the eight symmetries of the square."""
    mirror_x, mirror_y, swap = ((symmetry_B >> bit & 1) for bit in range(3))
    x, y = maps[0] * (1 - 2 * mirror_x), maps[1] * (1 - 2 * mirror_y)
    return torch.stack([torch.where(swap > 0, y, x), torch.where(swap > 0, x, y)])


def _pixels(words: Words, u_BK: Tensor, symmetry_B: Tensor, size: tuple[int, int], margin: int) -> Tensor:
    """Flat pixel indices [W, K] of K points in every leaf, scaled to fill the image.

    The points are those of K other leaves, chosen by the evenly spread `u_BK`: a leaf is a small copy of the whole. The point
    of a word is the word applied twice to the origin, which is all but on the attractor.
    """
    count_B = torch.bincount(words.image, minlength=len(u_BK))
    chosen_BK = (u_BK * count_B[:, None]).long() + (count_B.cumsum(0) - count_B)[:, None]
    picked = words.affine.index_select(2, chosen_BK.flatten()).unflatten(2, chosen_BK.shape)
    x_BK, y_BK = picked[0, 2], picked[1, 2]
    x_BK, y_BK = (row[0] * x_BK + row[1] * y_BK + row[2] for row in picked)
    x_WK, y_WK = x_BK.index_select(0, words.image), y_BK.index_select(0, words.image)
    rows = _turned(words.affine, symmetry_B.index_select(0, words.image))
    flat_WK = torch.zeros(())
    for row, side, stride in ((rows[1], size[0], size[1]), (rows[0], size[1], 1)):
        points = row[0, :, None] * x_WK
        points += row[1, :, None] * y_WK
        points += row[2, :, None]
        low_B, high_B = (torch.full((len(u_BK),), far, device=points.device) for far in (torch.inf, -torch.inf))
        low_B.scatter_reduce_(0, words.image, points.amin(dim=1), "amin")
        high_B.scatter_reduce_(0, words.image, points.amax(dim=1), "amax")
        # The small numbers keep a flat attractor from a division by zero, and the last point inside the last pixel.
        scale_B = (side - 2 * margin - 2**-8) / (high_B - low_B).clamp_min(1e-6)
        points -= low_B.index_select(0, words.image)[:, None]
        points *= scale_B.index_select(0, words.image)[:, None]
        flat_WK = flat_WK + points.floor_().add_(margin).mul_(stride)  # whole numbers below 2^24: exact in float32
    return flat_WK.long()


def _stamped(flat_WK: Tensor, level_W: Tensor, image_W: Tensor, dots_B: Tensor, size: tuple[int, int]) -> Tensor:
    """Levels uint8 [B, Y, X] with a dot at each point; the highest level wins."""
    cells, reach = math.prod(size), size[1] + 1  # a shift by a row and a column; the margin keeps rows apart
    canvas = torch.zeros(len(dots_B), cells + 2 * reach, dtype=torch.uint8, device=flat_WK.device)
    flat_WK += image_W[:, None] * canvas.shape[1] + reach
    canvas.view(-1).scatter_reduce_(0, flat_WK.view(-1), level_W.repeat_interleave(_INNER), "amax")
    grid = torch.zeros(len(dots_B), cells, dtype=torch.uint8, device=flat_WK.device)
    for bit in range(9):
        shift = bit // 3 * size[1] + bit % 3
        kept_B1 = ((dots_B >> bit & 1) * 255).to(torch.uint8)[:, None]
        grid = torch.maximum(grid, canvas[:, shift : shift + cells] & kept_B1)
    return grid.view(-1, *size)


def _shrunk(level_BYX: Tensor, palette_B3M: Tensor | None, factor: int) -> Tensor:
    """Blocks of the fine grid as one pixel, uint8 [B, C, Y, X], in whole numbers."""
    if palette_B3M is None:
        return (_block_sums(level_BYX, factor)[:, None].int() * 255 // factor**2).to(torch.uint8)
    # Red, green and blue in one number, 16 bits each: enough for the sum of 8x8 blocks, and a third of the work.
    packed_BM = palette_B3M[:, 0] + (palette_B3M[:, 1] << 16) + (palette_B3M[:, 2] << 32)
    packed_BP = F.pad(packed_BM, (1, 0)).gather(1, level_BYX.flatten(1).long())
    sums_BYX = _block_sums(packed_BP.view_as(level_BYX), factor)
    return torch.stack([(sums_BYX >> shift & 0xFFFF) // factor**2 for shift in (0, 16, 32)], dim=1).to(torch.uint8)


def _block_sums(x_BYX: Tensor, factor: int) -> Tensor:
    while factor > 1:
        x_BYX = x_BYX[:, ::2] + x_BYX[:, 1::2]
        x_BYX = x_BYX[:, :, ::2] + x_BYX[:, :, 1::2]
        factor //= 2
    return x_BYX


def _sum_in_order(x_BM: Tensor) -> Tensor:
    """Over the maps, one by one: `sum` may add in another order elsewhere."""
    return functools.reduce(torch.add, x_BM.unbind(dim=1))


def _fine_factor(image_size: tuple[int, int]) -> int:
    """How much finer the grid is than the image: 2, 4 or 8."""
    return next(factor for factor in (2, 4, 8) if factor * min(image_size) >= _FINE_SIDE or factor == 8)
