"""What Figures 7 and 11 show, as numbers that a claim can be tested on.

Letters: L layers, H heads, Y and X a grid of positions, N its positions in raster order, K filters, C channels, P patch side.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_LOW, _HIGH = 0.5, 0.75  # of the distance of uniform attention: below is local, above is global
_HALF = 0.5  # of the highest frequency that a patch can hold


def numbers_of(arrays: Mapping[str, Array], uniform_px: float | None) -> dict[str, float]:
    """Every number that the arrays of `vitlab inspect` allow."""
    found: dict[str, float] = {}
    if "attention_distance" in arrays and uniform_px:
        found |= _distances(arrays["attention_distance"] / uniform_px)
    if "position_similarity" in arrays:
        found["row_column_excess"] = row_column_excess(arrays["position_similarity"])
        found["position_nearness"] = position_nearness(arrays["position_similarity"])
    if "filters" in arrays:
        found["filter_low_frequency"] = low_frequency_share(arrays["filters"], arrays["filters_explained"])
    return found


def _distances(share_LH: Array) -> dict[str, float]:
    """Attention distances as shares of what uniform attention has."""
    layers = len(share_LH)
    low_layers = share_LH[: max(1, layers // 3)]
    depth_L = np.arange(layers) / max(1, layers - 1)
    return {
        "distance_first_layer": float(share_LH[0].mean()),
        "distance_last_layer": float(share_LH[-1].mean()),
        "distance_by_depth": float(np.polyfit(depth_L, share_LH.mean(axis=1), 1)[0]) if layers > 1 else 0.0,
        "low_layers_nearest_head": float(low_layers.min()),
        "low_layers_farthest_head": float(low_layers.max()),
        "low_layers_local_heads": float((low_layers < _LOW).mean()),
        "low_layers_global_heads": float((low_layers > _HIGH).mean()),
        **{head_key("distance", *place): float(share) for place, share in np.ndenumerate(share_LH)},
    }


def head_key(measure: str, layer: int, head: int) -> str:
    """What a number of one head is called in a record, counted from 1."""
    return f"{measure}_layer{layer + 1}_head{head + 1}"


def read_heads(numbers: Mapping[str, float], measure: str) -> dict[int, list[float]]:
    """The numbers of all heads by layer, the smallest first: between seeds, heads have no order of their own."""
    named = re.compile(rf"{re.escape(measure)}_layer(\d+)_head\d+")
    found: dict[int, list[float]] = {}
    for key, value in numbers.items():
        if match := named.fullmatch(key):
            found.setdefault(int(match[1]), []).append(value)
    return {layer: sorted(values) for layer, values in sorted(found.items())}


def heads_measure(numbers: Mapping[str, float], measure: str) -> float | None:
    """A measure that is made of the numbers of heads and layers; None where they are not there, or it is none of these."""
    match measure:
        case "distance_growth" if "distance_last_layer" in numbers:
            return numbers["distance_last_layer"] - numbers["distance_first_layer"]
        case "second_half_wide_heads" if heads := read_heads(numbers, "distance"):
            shares = [share for layer, layer_heads in heads.items() if layer > len(heads) / 2 for share in layer_heads]
            return sum(share > _HIGH for share in shares) / len(shares)
        case _:
            return None


def position_nearness(similarity_YXYX: Array) -> float:
    """How the cosine of two positions goes with how near they are on the grid: their correlation, over all pairs."""
    down_NN, across_NN, similarity_NN = _pairs(similarity_YXYX)
    each = np.triu_indices(len(similarity_NN), 1)
    distance_P, cosine_P = np.hypot(down_NN, across_NN)[each], similarity_NN[each]
    if len(set(distance_P)) < 2 or len(set(cosine_P)) < 2:  # nothing to go along with
        return 0.0
    return float(-np.corrcoef(distance_P, cosine_P)[0, 1])


def row_column_excess(similarity_YXYX: Array) -> float:
    """How much more alike positions of one row or column are than others as far apart, in cosine.

    Near positions are alike anyway; so each pair off the axes is compared with pairs on them at its own distance, between whose
    whole numbers is interpolated. The grid is that of the positions, which may be finer than that of an inspected image.
    """
    down_NN, across_NN, similarity_NN = _pairs(similarity_YXYX)
    steps = np.arange(1, max(similarity_YXYX.shape))
    on_axis = [
        similarity_NN[((down_NN == step) & (across_NN == 0)) | ((down_NN == 0) & (across_NN == step))].mean()
        for step in steps
    ]
    distance_NN = np.hypot(down_NN, across_NN)
    off_axis = (down_NN > 0) & (across_NN > 0) & (distance_NN <= steps[-1])
    if not off_axis.any():  # a single row
        return 0.0
    return float((np.interp(distance_NN[off_axis], steps, on_axis) - similarity_NN[off_axis]).mean())


def _pairs(similarity_YXYX: Array) -> tuple[Array, Array, Array]:
    """Of every two positions: how many rows and columns they are apart, and how alike."""
    grid = similarity_YXYX.shape[:2]
    rows, cols = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down_NN, across_NN = np.abs(rows[:, None] - rows), np.abs(cols[:, None] - cols)
    return down_NN, across_NN, similarity_YXYX.reshape(len(rows), len(rows))


def low_frequency_share(filters_KCPP: Array, explained_K: Array) -> float:
    """Share of the filters' power at low frequencies, as a CNN's first layer has it; each by the variance it explains."""
    spectrum = explained_K[:, None, None, None] * np.abs(np.fft.fft2(filters_KCPP)) ** 2
    along = np.abs(np.fft.fftfreq(filters_KCPP.shape[-1])) * 2  # as a share of the highest
    low = (along[:, None] <= _HALF) & (along <= _HALF)
    return float(spectrum[:, :, low].sum() / max(spectrum.sum(), 1e-30))  # filters of zeros have no power at all
