"""The numbers of an inspection: arrays for whoever computes on, and a short account for people and scripts.

Of a second model, every name ends in `_b`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vitlab.engines.inspecting import Inspected, Photos
from vitlab.inspection.attention import AttentionStatistics
from vitlab.inspection.faithfulness import Verdict, verdict
from vitlab.inspection.representations import cka

Array = np.ndarray[Any, Any]


def to_arrays(found: Sequence[Inspected], photos: Photos) -> dict[str, Array]:
    """By name; axes are layers, photos, heads, tokens, rows and columns of patches, in that order."""
    arrays: dict[str, Array] = {"photos": np.array(photos.names, np.str_)}
    for one, suffix in zip(found, ("", "_b"), strict=False):
        arrays |= {f"{name}{suffix}": value for name, value in _arrays(one).items()}
    if all(one.layers is not None for one in found):
        arrays["cka"] = cross_cka(found).numpy()
    return arrays


def cross_cka(found: Sequence[Inspected]) -> Tensor:
    """Between all layers of the model, or of the first (rows) and the second one (columns)."""
    first, second = found[0].layers, found[-1].layers
    assert first is not None and second is not None
    return cka(first) if len(found) == 1 else cka(first, second)


def _arrays(one: Inspected) -> dict[str, Array]:
    tensors: dict[str, Tensor] = {}
    if one.filters is not None:
        tensors |= {"filters": one.filters.components_KCPP, "filters_explained": one.filters.explained_K}
        tensors |= {} if one.filters.filters_DCPP is None else {"first_filters": one.filters.filters_DCPP}
    if one.positions is not None:
        tensors["position_similarity"] = one.positions.similarity_YXYX
    if (found := one.statistics) is not None:
        tensors |= {
            "attention_distance": found.distance_LH,
            "attention_distance_with_prefix": found.distance_with_prefix_LH,
            "attention_entropy": found.entropy_LH,
            "attention_to_prefix": found.prefix_share_LH,
        }
    if one.maps is not None:
        for method, heat_BYX in one.maps.heat_BYX.items():
            name, curves = method.replace("-", "_"), one.maps.curves[method]
            tensors |= {f"saliency_{name}": heat_BYX, f"randomised_{name}": one.maps.randomised_B[method]}
            tensors |= {f"deletion_{name}": curves.deletion_BF, f"insertion_{name}": curves.insertion_BF}
        random = one.maps.random
        tensors |= {"deletion_random": random.deletion_BF, "insertion_random": random.insertion_BF}
    if one.pca is not None:
        tensors["patch_pca"] = one.pca.colours_BYX3
    if one.neighbours is not None:
        tensors["patch_similarity"] = one.neighbours.similarity_QBYX
    if one.norms is not None:
        tensors |= {"token_norms": one.norms.norms_LBT, "norm_outliers": one.norms.outliers_LBYX}
    if one.lens is not None:
        tensors["lens_similarity"] = one.lens.similarity_LB
        tensors |= {} if one.lens.logits_LBK is None else {"lens_logits": one.lens.logits_LBK}
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    arrays |= {"tokens": np.array(one.tokens, np.str_), "grid": np.array(one.grid)}
    if one.maps is not None:
        arrays["fractions"] = np.array(one.maps.random.fractions)
    return arrays


def verdicts(one: Inspected) -> dict[str, Verdict]:
    """By method, whether its maps find what the score depends on."""
    maps = one.maps
    if maps is None:
        return {}
    return {method: verdict(maps.curves[method], maps.random, maps.randomised_B[method]) for method in maps.curves}


def to_numbers(found: Sequence[Inspected], photos: Photos) -> dict[str, Any]:
    """The account: `model`, and `compare` where there are two."""
    names = ("model", "compare")
    numbers: dict[str, Any] = {name: _numbers(one) for name, one in zip(names, found, strict=False)}
    return {**numbers, "photos": list(photos.names)}


def _numbers(one: Inspected) -> dict[str, Any]:
    table: dict[str, Any] = {"name": one.name, "grid": list(one.grid), "layers": one.spec.num_blocks}
    table["heads"] = one.spec.attention_shape[1]
    if one.predictions:
        table["predictions"] = [
            [{"label": each.label, "p": round(each.p, 6)} for each in row] for row in one.predictions
        ]
    if one.filters is not None:
        table["filters"] = {"of": one.filters.source, "explained": _rounded(one.filters.explained_K)}
    if one.positions is not None:
        table["positions"] = {"kind": one.positions.kind, "note": one.positions.note}
    if (found := one.statistics) is not None:
        table["attention"] = {
            "images": found.images,
            "mean_distance_px": _rounded(found.distance_LH.mean(dim=1)),
            "uniform_distance_px": round(found.uniform_distance, 2),
            "mean_entropy_bits": _rounded(found.entropy_LH.mean(dim=1)),
            **({} if one.spec.has_attention_maps else {"layers": _layers(found)}),
        }
    if one.maps is not None:
        table["saliency"] = {method: _faithful(one, method, judged) for method, judged in verdicts(one).items()}
    if one.norms is not None:
        table["norm_outliers"] = {"patches": sum(one.norms.counts), "layer": one.norms.layer + 1}
    if one.missing:
        table["missing"] = dict(one.missing)
    return table


def _layers(found: AttentionStatistics) -> list[dict[str, Any]]:
    """The layers, where each has a grid of its own."""
    uniform = zip(found.layers, found.uniform_distance_L, found.uniform_entropy_L, strict=True)
    return [
        {
            **{"name": layer.name, "grid": list(layer.grid), "key_grid": list(layer.key_grid), "stride": layer.stride},
            **{"uniform_distance_px": round(pixels, 2), "uniform_entropy_bits": round(bits, 4)},
        }
        for layer, pixels, bits in uniform
    ]


def _faithful(one: Inspected, method: str, judged: Verdict) -> Mapping[str, Any]:
    assert one.maps is not None
    curves, random = one.maps.curves[method], one.maps.random
    return {
        "deletion": round(float(curves.deletion_area_B.mean()), 4),
        "deletion_random_order": round(float(random.deletion_area_B.mean()), 4),
        "insertion": round(float(curves.insertion_area_B.mean()), 4),
        "insertion_random_order": round(float(random.insertion_area_B.mean()), 4),
        "randomised_weights_correlation": round(judged.rank_correlation or 0.0, 4),
        "beats_random_order": judged.beats_random,
        "follows_weights": judged.follows_weights,
        "verdict": judged.sentence,
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
