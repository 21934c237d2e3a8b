"""The answer of /v1/explain: which patches a label depends on, attention through the layers, and that of every head.

Two steps, since a server does them in different processes: `see` decodes an untrusted photo, `explain` asks the model.
Maps are places on their colour scale in whole steps from 0 to 255, row by row, as base64: a page draws them with
`inspection/colours.py`, and nothing is computed there. Letters: C channels, Y X rows and columns, L layers, H heads, T tokens.
"""

import base64
import dataclasses
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.decode import ImageInput, decode, read
from vitlab.data.preprocess import Preprocess, Region, normalise, seen_region
from vitlab.engines.classifier import CUT_OFF, Classifier, Prediction, salient
from vitlab.inspection.attention import require_vit
from vitlab.inspection.meanings import Meaning, meanings_of
from vitlab.inspection.overlays import overlay, to_picture, whole_zoom
from vitlab.inspection.rollout import on_grid, output_row, rolled_layers
from vitlab.inspection.saliency import Method, methods_of
from vitlab.inspection.scales import Scale, measured, times_uniform
from vitlab.models.spec import ModelSpec, Pair
from vitlab.models.vit import ViT
from vitlab.report.figures import jpeg, png

Detail = Literal["full", "map"]  # everything, or no more than the map of a label

_SIDE_PX = 1024  # of the photo that is shown: twice what a page has room for
_LEVELS = 255


@dataclasses.dataclass(frozen=True)
class SeenPhoto:
    """A photo as the model sees it, and as people do: upright and whole, reduced to what a page has room for."""

    pixels_CYX: Tensor  # uint8, what `read` gives
    shown_CYX: Tensor  # uint8
    size: Pair  # rows and columns of the photo itself, upright


def see(image: ImageInput, rule: Preprocess) -> SeenPhoto:
    """Decode a photo; raises FileProblem where it cannot be read."""
    photo_CYX = decode(image, rule.mode, rule.bits)
    rows, cols = photo_CYX.shape[1:]
    shown = to_picture(photo_CYX)
    shown.thumbnail((_SIDE_PX, _SIDE_PX), Image.Resampling.BICUBIC)
    shown_CYX = torch.from_numpy(np.array(shown).reshape(shown.height, shown.width, -1)).permute(2, 0, 1)
    return SeenPhoto(read(image, rule), shown_CYX.contiguous(), (rows, cols))


@torch.inference_mode()
def explain(
    classifier: Classifier,
    photo: SeenPhoto,
    method: Method | None = None,
    label: str | None = None,
    detail: Detail = "full",
) -> dict[str, Any]:
    """What /v1/explain answers, ready for JSON; raises UsageError where the model has no such method or label."""
    x_BCYX = normalise(classifier.preprocess, photo.pixels_CYX[None].to(classifier.device))
    found = salient(classifier, x_BCYX, method, label)
    values_YX, scale = measured(found.heat_YX, found.meaning.unit)
    about = found.label if found.meaning.of_score else None
    region, cut_off = _region(classifier.preprocess, photo.size)
    answer: dict[str, Any] = {
        "top": [_described(one) for one in found.top],
        "methods": describe_methods(classifier.model.spec),
        "photo": {
            "width": photo.size[1],
            "height": photo.size[0],
            "region": [round(side, 3) for side in region],
            "note": CUT_OFF if cut_off else None,
        },
        "map": {
            "method": found.method,
            "label": about,
            **_words(found.meaning, about),
            **_drawn(values_YX[None], scale),
            "values": [round(value, 4) for value in found.strongest_at_1().flatten().tolist()],
        },
        "picture": None,
        "rollout": None,
        "heads": None,
    }
    if detail == "full":
        answer["picture"] = _picture(photo)
        if classifier.model.spec.has_attention_maps:
            answer |= _inside(require_vit(classifier.model), x_BCYX)
    return answer


@torch.inference_mode()
def draw(classifier: Classifier, photo: SeenPhoto, method: Method | None = None, label: str | None = None) -> bytes:
    """The map over the photo, as a PNG."""
    x_BCYX = normalise(classifier.preprocess, photo.pixels_CYX[None].to(classifier.device))
    found = salient(classifier, x_BCYX, method, label)
    values_YX, scale = measured(found.heat_YX, found.meaning.unit)
    region, cut_off = _region(classifier.preprocess, photo.size)
    rows, cols = photo.shown_CYX.shape[1:]
    down, across = rows / photo.size[0], cols / photo.size[1]
    here = Region(region.top * down, region.left * across, region.rows * down, region.cols * across)
    zoom = whole_zoom(rows, cols)
    return png(overlay(photo.shown_CYX, values_YX, scale, region=here if cut_off else None, zoom=zoom))


def describe_methods(spec: ModelSpec) -> list[dict[str, Any]]:
    """The methods that a model has maps by, with the title of each and whether its maps are about one label."""
    words = meanings_of(has_tokens=spec.has_attention_maps)
    return [
        {"name": method, "title": words[method].title, "by_label": words[method].of_score}
        for method in methods_of(spec)
    ]


def _inside(vit: ViT, x_BCYX: Tensor) -> dict[str, Any]:
    """Rollout after every layer, and where the output looks in every head, from one pass through the layers."""
    heads: list[Tensor] = []
    depths: list[Tensor] = []
    words = meanings_of(has_tokens=True)
    first = vit.spec.num_prefix
    for weights_BHTT, rolled_BTT in rolled_layers(weights for _, weights in vit.attention_layers(x_BCYX)):
        weights_HTT = weights_BHTT[0]
        row_HT = weights_HTT[:, 0] if vit.spec.uses_cls else weights_HTT[:, first:].mean(dim=1)
        heads.append(on_grid(vit, x_BCYX, row_HT))
        depths.append(on_grid(vit, x_BCYX, output_row(vit, x_BCYX, rolled_BTT, layers=len(depths) + 1))[0])
    rollout_LYX, of_rollout = measured(torch.stack(depths), words["rollout"].unit)
    tokens = first + depths[0].numel()
    heads_NYX, of_heads = times_uniform(torch.cat(heads), tokens)
    return {
        "rollout": {"depths": len(depths), **_words(words["rollout"]), **_drawn(rollout_LYX, of_rollout)},
        "heads": {
            "layers": len(heads),
            "heads": len(heads[0]),
            **_words(words["head"]),
            **_drawn(heads_NYX, of_heads),
        },
    }


def _picture(photo: SeenPhoto) -> str:
    """The photo as a data address; an image whose pixels one can count keeps each of them."""
    picture, photos = to_picture(photo.shown_CYX), whole_zoom(*photo.size) == 1
    encoded = jpeg(picture, max(picture.size)) if photos else png(picture)
    return f"data:image/{'jpeg' if photos else 'png'};base64,{base64.b64encode(encoded).decode()}"


def _region(rule: Preprocess, size: Pair) -> tuple[Region, bool]:
    """What the model saw of the photo, and whether that is less than all."""
    region = seen_region(rule, *size)
    return region, round(region.rows) < size[0] or round(region.cols) < size[1]


def _words(meaning: Meaning, label: str | None = None) -> dict[str, Any]:
    return {"title": meaning.title, "caption": meaning.caption_for(label)}


def _drawn(values_NYX: Tensor, scale: Scale) -> dict[str, Any]:
    """Maps on one scale: the grid, the places, and how the scale is read."""
    places = np.rint(_LEVELS * scale.place(values_NYX.numpy())).astype(np.uint8)
    return {
        "grid": list(values_NYX.shape[1:]),
        "places": base64.b64encode(places.tobytes()).decode(),
        "scale": {"sentence": scale.sentence, "ticks": [[round(place, 4), text] for place, text in scale.ticks()]},
    }


def _described(one: Prediction) -> dict[str, Any]:
    """Without `has` where every image has just one label."""
    return {name: value for name, value in dataclasses.asdict(one).items() if value is not None}
