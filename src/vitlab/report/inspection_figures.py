"""The paper's figures and those of later work, from numbers: sheets of pictures, and charts.

A sheet is a `Canvas`, which gives SVG and pixels of itself; a chart is one for the page, and an SVG file of its own. Layers
and heads are counted from 1, as in the paper. Letters: L layers, H heads, B images, T tokens, C channels, Y X rows and columns.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab.inspection.canvas import TEXT_PX, Canvas, shortened, text_width
from vitlab.inspection.colours import coloured
from vitlab.inspection.meanings import MEANINGS
from vitlab.inspection.overlays import draw_legend, legend_height, overlay, to_picture, whole_zoom
from vitlab.inspection.scales import Scale, measured, times_uniform
from vitlab.models.spec import Pair
from vitlab.report.charts import Chart, Series

Grid = tuple[int, int, int]  # image, row and column of a patch

_LINE_PX = 1.4 * TEXT_PX
_FILTERS_PX, _FILTERS_GAP_PX, _FILTERS_IN_A_ROW = 64, 4, 7  # Figure 7 has 28 of them in four rows
_MAPS_PX, _MAPS_GAP_PX, _MOST_MAPS = 840, 4, 14  # of positions: pixels of a file, and as many maps as ViT-L/16 has
_SHEET_TEXT_PX = 15  # beside them: a page shows them smaller than they are
_BAR_PX = 12  # the width of a colour bar that stands beside
_PANEL_PX, _SMALL_PANEL_PX, _GAP_PX = 200, 132, 10  # of photos beside each other
_PANELS_IN_A_ROW, _PAIRS_IN_A_ROW = 6, 4
_BESIDE = 0.22  # how far apart the dots of two models stand, in layers
_FRAME_COLOURS = ("#ffffff", "#e8590c")  # around a patch: an edge that shows on dark, and the line


# --- what a model has learned: filters, positions ---------------------------------------------------------------------


def filters_sheet(components_KCPP: Tensor, *, columns: int = _FILTERS_IN_A_ROW) -> Canvas:
    """Filters as pictures (Figure 7, left): zero is the middle grey, the largest size of each its brightest or darkest."""
    columns = min(columns, len(components_KCPP))
    step, rows = _FILTERS_PX + _FILTERS_GAP_PX, math.ceil(len(components_KCPP) / columns)
    canvas = Canvas(columns * step - _FILTERS_GAP_PX, rows * step - _FILTERS_GAP_PX)
    for number, component_CPP in enumerate(components_KCPP.detach().float().cpu()):
        row, column = divmod(number, columns)
        grey_CPP = 0.5 + 0.5 * component_CPP / component_CPP.abs().max().clamp(min=1e-30)
        place = (column * step, row * step, _FILTERS_PX, _FILTERS_PX)
        canvas.picture(to_picture((255 * grey_CPP).round().byte()), place, crisp=True)
    return canvas


def position_sheet(similarity_YXYX: Tensor) -> Canvas:
    """A map per patch: how alike its position is to every other (Figure 7, centre, and Figure 10).

    Of a large grid, the maps of some patches are shown, evenly chosen; each map still has all of the grid.
    """
    rows, cols = similarity_YXYX.shape[:2]
    shown = tuple(range(0, count, -(-count // _MOST_MAPS)) for count in (rows, cols))
    zoom = max(1, round(_MAPS_PX / (len(shown[1]) * cols)))
    high, wide = zoom * rows + _MAPS_GAP_PX, zoom * cols + _MAPS_GAP_PX
    # By the numbers of colours, 0 for nothing: a tenth of the bytes, which a page holds.
    pixels = np.zeros((len(shown[0]) * high - _MAPS_GAP_PX, len(shown[1]) * wide - _MAPS_GAP_PX), np.uint8)
    for y, row in enumerate(shown[0]):
        for x, col in enumerate(shown[1]):
            map_YX = ((similarity_YXYX[row, col].detach().float().cpu().numpy() + 1) / 2).clip(0, 1)
            drawn_YX = (1 + 254 * map_YX).round().astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)
            pixels[y * high : (y + 1) * high - _MAPS_GAP_PX, x * wide : (x + 1) * wide - _MAPS_GAP_PX] = drawn_YX
    picture = Image.fromarray(pixels)
    picture.putpalette([0, 0, 0, *coloured(np.linspace(0, 1, 255), "viridis").ravel().tolist()])
    picture.info["transparency"] = 0
    axes = ("input patch column", "input patch row")
    numbers = ([row + 1 for row in shown[0]], [col + 1 for col in shown[1]])
    return _matrix_sheet(picture, numbers, axes, Scale(-1, 1, "cosine similarity"), "viridis")


def cka_sheet(similarity_LL: Tensor, rows: str = "", columns: str = "") -> Canvas:
    """How alike the representations of every two layers are, from the first layer upwards; the names are the models'."""
    values_LL = similarity_LL.detach().float().cpu().numpy()[::-1]
    zoom = max(1, round(_MAPS_PX / values_LL.shape[1]))
    picture = Image.fromarray(coloured(values_LL, "magma").repeat(zoom, axis=0).repeat(zoom, axis=1))
    axes = tuple(f"layer of {name}" if name else "layer" for name in (columns or rows, rows))
    numbers = ([len(values_LL) - row for row in range(len(values_LL))], [1 + col for col in range(values_LL.shape[1])])
    return _matrix_sheet(picture, numbers, (axes[0], axes[1]), Scale(0, 1, "linear CKA"), "magma")


def _matrix_sheet(
    picture: Image.Image, numbers: tuple[list[int], list[int]], axes: tuple[str, str], scale: Scale, colours: str
) -> Canvas:
    """A picture of evenly spaced rows and columns with their numbers, its axes, and the colour bar beside it."""
    width, height = picture.width / 2, picture.height / 2  # screens of many pixels, and files, show all of them
    size = _SHEET_TEXT_PX
    left, bar = 3.2 * size, 3.2 * size + width + 20
    named = bar + _BAR_PX + 8 + max(text_width(text, size) for _, text in scale.ticks()) + 1.4 * size
    canvas = Canvas(named, height + 2.9 * size)
    canvas.picture(picture, (left, 0, width, height), crisp=True)
    for place, number in _labelled(numbers[1], width / (2.2 * size)):
        canvas.text((left + width * place, height + 1.2 * size), str(number), anchor="middle", size=size)
    for place, number in _labelled(numbers[0], height / (1.4 * size)):
        canvas.text((left - 6, height * place + 0.35 * size), str(number), anchor="end", size=size)
    canvas.text((left + width / 2, height + 2.7 * size), axes[0], anchor="middle", size=size)
    canvas.text((0.8 * size, height / 2), axes[1], anchor="middle", size=size, upwards=True)
    canvas.picture(Image.fromarray(coloured(np.linspace(1, 0, 256)[:, None], colours)), (bar, 0, _BAR_PX, height))
    for place, text in scale.ticks():
        y = height * (1 - place)
        canvas.path([(bar + _BAR_PX, y), (bar + _BAR_PX + 4, y)])
        canvas.text((bar + _BAR_PX + 8, y + 0.35 * size), text, size=size)
    canvas.text((named, height / 2), scale.unit, anchor="middle", size=size, upwards=True)
    return canvas


def _labelled(numbers: list[int], most: float) -> list[tuple[float, int]]:
    """Where the middle of each lies, 0 to 1, and its number; of many, every second or third, from 1 on."""
    step = max(1, math.ceil(len(numbers) / max(1.0, most)))
    first = numbers.index(min(numbers)) % step
    return [((place + 0.5) / len(numbers), numbers[place]) for place in range(first, len(numbers), step)]


# --- what its layers do: charts ---------------------------------------------------------------------------------------


def distance_chart(distance_LH: Mapping[str, Tensor], uniform_L: Mapping[str, Sequence[float]]) -> Chart:
    """Mean attention distance, a dot per head over depth (Figure 7, right, and Figure 11), by the names of the models.

    `uniform_L` is the level of each layer where attention is uniform.
    """
    title = "Mean attention distance"
    caption = (
        "How far a head looks: the mean distance between a patch and what it attends to, weighted by the attention. One dot"
        " per head. A head that looks everywhere alike would stand at {} pixels."
    )
    return _heads_chart(title, caption, f"{title.lower()} (pixels)", distance_LH, _Levels(uniform_L, ".4g", "pixels"))


def entropy_chart(entropy_LH: Mapping[str, Tensor], uniform_L: Mapping[str, Sequence[float]]) -> Chart:
    """How evenly each head spreads its attention, a dot per head over depth."""
    title = "Attention entropy"
    caption = (
        "How widely a head looks: at {} bits it attends to all tokens alike, with every bit less to"
        " half as many, and at 0 to a single one. One dot per head."
    )
    return _heads_chart(title, caption, f"{title.lower()} (bits)", entropy_LH, _Levels(uniform_L, ".3g", "bits"))


class _Levels(NamedTuple):
    """Of uniform attention, for each layer of each model: all alike, unless the layers' grids differ."""

    by_model: Mapping[str, Sequence[float]]
    digits: str  # how a level is written
    unit: str

    def texts(self) -> dict[str, str]:
        """One number for each model, or the span over its layers."""
        ends = {name: (min(level_L), max(level_L)) for name, level_L in self.by_model.items()}
        return {name: " to ".join(dict.fromkeys(f"{end:{self.digits}}" for end in both)) for name, both in ends.items()}

    def sentence(self) -> str:
        """The level, or that of each model where they differ."""
        texts = self.texts()
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        return " and ".join(f"{text} ({name})" for name, text in texts.items())

    def lines(self, deepest: int) -> list[Series]:
        """A line for each model, or one for all where they have the same."""
        texts = self.texts()
        flat = all(len(set(level_L)) == 1 for level_L in self.by_model.values())
        shared = len(texts) == 1 or (flat and len(set(texts.values())) == 1)
        lines: list[Series] = []
        for name, level_L in list(self.by_model.items())[: 1 if shared else None]:
            points = [(layer + 1.0, level) for layer, level in enumerate(level_L)]
            if len(set(level_L)) == 1:
                points = [(0.5, level_L[0]), (deepest + 0.5, level_L[0])]
            what = f"uniform attention ({texts[name]} {self.unit})"
            lines.append(Series(what if shared else f"{name}: {what}", points, "guide"))
        return lines


def _heads_chart(title: str, caption: str, y_label: str, values_LH: Mapping[str, Tensor], uniform: _Levels) -> Chart:
    deepest = max(len(values) for values in values_LH.values())
    series: list[Series] = []
    for number, (name, values) in enumerate(values_LH.items()):
        shift = _BESIDE * (number - (len(values_LH) - 1) / 2)
        rows = values.detach().float().cpu().tolist()
        dots = [(layer + 1 + shift, value) for layer, row in enumerate(rows) for value in row]
        means = [(layer + 1.0, sum(row) / len(row)) for layer, row in enumerate(rows)]
        named = f"{name}: " if len(values_LH) > 1 else ""
        series += [
            Series(f"{named}heads", dots, "points", number),
            Series(f"{named}mean of the heads", means, "line", number),
        ]
    series += uniform.lines(deepest)
    caption = caption.format(uniform.sentence())
    return Chart(title, caption, series, "network depth (layer)", y_label, x_range=(0.5, deepest + 0.5))


def norms_chart(norms_LBT: Tensor, num_prefix: int = 1, thresholds_L: Tensor | None = None) -> Chart:
    """The size of the tokens after every layer, and the size above which a patch is an outlier."""
    norms = norms_LBT.detach().float().cpu()
    patches = norms[:, :, num_prefix:].flatten(1).numpy()
    lines = {
        "largest patch": patches.max(axis=1),
        "median patch": np.median(patches, axis=1),
    }
    if num_prefix:
        lines["class token"] = norms[:, :, 0].mean(dim=1).numpy()
    if num_prefix > 1:
        lines["registers"] = norms[:, :, 1:num_prefix].mean(dim=(1, 2)).numpy()
    series = [
        Series(name, [(layer + 1, float(value)) for layer, value in enumerate(values)], "dots", number)
        for number, (name, values) in enumerate(lines.items())
    ]
    if thresholds_L is not None:
        points = [(layer + 1.0, value) for layer, value in enumerate(thresholds_L.tolist())]
        series.append(Series("outliers are above", points, "guide"))
    caption = (
        "The L2 norm of tokens after each layer. Where the largest patches leave the median far behind, the model keeps"
        " something of the whole image in them: artefacts that registers take over."
    )
    return Chart("Token norms", caption, series, "network depth (layer)", "L2 norm", x_range=(0.5, len(norms) + 0.5))


def lens_chart(p_LB: Tensor, names: Sequence[str], *, of_answer: bool = True) -> Chart:
    """At which layer each image's answer forms: its probability, or without a head the similarity to the last layer."""
    series = [
        Series(name, [(layer + 1, value) for layer, value in enumerate(values)], "dots", number)
        for number, (name, values) in enumerate(zip(names, p_LB.detach().float().cpu().T.tolist(), strict=True))
    ]
    if of_answer:
        title, y_label = "Logit lens", "probability of the final answer"
        caption = (
            "The head, applied to every layer's output: how sure it would be of the final answer if it ended there."
        )
    else:
        title, y_label = "Layers on the way to the last", "cosine to the last layer"
        caption = (
            "How alike each layer's representation of an image is to the last one's. The model has no head to apply."
        )
    span = (0.5, len(p_LB) + 0.5)
    return Chart(
        title, caption, series, "network depth (layer)", y_label, percent=of_answer, x_range=span,
        y_range=(min(0.0, float(p_LB.min())), 1),
    )  # fmt: skip


def curves_chart(
    title: str, shares: Sequence[float], score_by_map: Mapping[str, Sequence[float]], random: Sequence[float]
) -> Chart:
    """A deletion or an insertion curve per map over the share of patches, beside patches in random order."""
    series = [
        Series(name, list(zip(shares, values, strict=True)), "dots", number)
        for number, (name, values) in enumerate(score_by_map.items())
    ]
    series.append(Series("patches in random order", list(zip(shares, random, strict=True)), "dashed", 7))
    deletion = "deletion" in title.lower()
    done, better = ("taken away", "falls sooner") if deletion else ("put back", "rises sooner")
    caption = (
        f"The score as patches are {done}, those first that the map marks most. A map that finds what matters {better}"
        " than patches in random order do."
    )
    return Chart(title, caption, series, f"share of the patches {done}", "score", x_range=(0, 1))


# --- where it looks: photos -------------------------------------------------------------------------------------------


def saliency_row(
    photo_CYX: Tensor, heat_by_method: Mapping[str, Tensor], *, framed: tuple[Pair, Pair] | None = None
) -> Canvas:
    """A photo and, beside it, its map by each method, with the title and the legend of each.

    `framed` is the place of a patch, and the grid that it is on: where attention starts from.
    """
    width, height = _panel_size(photo_CYX, _PANEL_PX)
    scaled = {
        name: measured(heat_YX, MEANINGS[name].unit if name in MEANINGS else "mean")
        for name, heat_YX in heat_by_method.items()
    }
    below = max(legend_height(scale, width) for _, scale in scaled.values())
    canvas = Canvas((1 + len(scaled)) * (width + _GAP_PX) - _GAP_PX, _LINE_PX + height + 6 + below)
    top = _LINE_PX
    canvas.text((0, TEXT_PX), "photo")
    canvas.picture(_photo(photo_CYX), (0, top, width, height))
    for number, (name, (values_YX, scale)) in enumerate(scaled.items(), start=1):
        left = number * (width + _GAP_PX)
        title = MEANINGS[name].title if name in MEANINGS else name
        canvas.text((left, TEXT_PX), shortened(title, width))
        canvas.picture(_drawn(photo_CYX, values_YX, scale), (left, top, width, height))
        draw_legend(canvas, scale, (left, top + height + 6), width)
    if framed is not None:
        _frame(canvas, *framed, (0, top, width, height))
    return canvas


def head_sheet(
    photo_CYX: Tensor, weights_HYX: Tensor, layer: int, *, tokens: int, heads: Sequence[int] | None = None
) -> Canvas:
    """Where heads of a layer look from one token; `layer` counts from 0, `tokens` are all that share the attention.

    `heads` are the numbers of those that are shown, from 0; by default they are the first.
    """
    values_HYX, scale = times_uniform(weights_HYX, tokens)
    titles = [f"layer {layer + 1}, head {head + 1}" for head in heads or range(len(values_HYX))]
    pictures = [_drawn(photo_CYX, values_YX, scale) for values_YX in values_HYX]
    return _panels(pictures, titles, _panel_size(photo_CYX, _SMALL_PANEL_PX), scale)


def _panels(pictures: Sequence[Image.Image], titles: Sequence[str], size: Pair, legend: Scale | None = None) -> Canvas:
    """Pictures of one size with a title above each, in rows; and the legend of all of them."""
    width, height = size
    columns = min(_PANELS_IN_A_ROW, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    step = height + _LINE_PX + 6
    whole = columns * (width + _GAP_PX) - _GAP_PX
    bar = min(whole, 360)
    canvas = Canvas(whole, rows * step + (4 + legend_height(legend, bar) if legend else 0))
    for number, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        row, column = divmod(number, columns)
        left, top = column * (width + _GAP_PX), row * step
        canvas.text((left, top + TEXT_PX), shortened(title, width))
        canvas.picture(picture, (left, top + _LINE_PX, width, height))
    if legend:
        draw_legend(canvas, legend, (0, rows * step + 4), bar)
    return canvas


# --- what patches hold: features --------------------------------------------------------------------------------------


def pca_picture(colours_YX3: Tensor, size: Pair) -> Image.Image:
    """Colours of patches, 0 to 1, as a picture of `size` rows and columns."""
    pixels = (255 * colours_YX3.detach().float().cpu().clamp(0, 1)).round().byte().numpy()
    return Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.NEAREST)


def pca_sheet(photos_BCYX: Sequence[Tensor], colours_BYX3: Tensor) -> Canvas:
    """Photos, and below each the colours of its patches: what is alike to the model has one colour, in all photos."""
    width, height = _panel_size(photos_BCYX[0], _PANEL_PX)
    columns = min(_PAIRS_IN_A_ROW, len(photos_BCYX))
    step = 2 * height + 6 + 2 * _GAP_PX
    rows = math.ceil(len(photos_BCYX) / columns)
    canvas = Canvas(columns * (width + _GAP_PX) - _GAP_PX, rows * step - 2 * _GAP_PX)
    for number, (photo_CYX, colours_YX3) in enumerate(zip(photos_BCYX, colours_BYX3, strict=True)):
        row, column = divmod(number, columns)
        left, top = column * (width + _GAP_PX), row * step
        canvas.picture(_photo(photo_CYX), (left, top, width, height))
        made = pca_picture(colours_YX3, (2 * height, 2 * width))
        canvas.picture(made, (left, top + height + 6, width, height), crisp=True)
    return canvas


def nearest_sheet(
    photos_BCYX: Sequence[Tensor], grid: Pair, query: Grid, matches: Sequence[tuple[Grid, float]]
) -> Canvas:
    """A patch framed on its photo, and on others the patches most like it, with their cosine."""
    image, row, col = query
    shown = [(query, f"query: patch ({row}, {col})"), *((place, f"cosine {value:.2f}") for place, value in matches)]
    width, height = _panel_size(photos_BCYX[image], _PANEL_PX)
    canvas = _panels(
        [_photo(photos_BCYX[place[0]]) for place, _ in shown], [caption for _, caption in shown], (width, height)
    )
    for number, ((_, row, col), _) in enumerate(shown):
        line, column = divmod(number, min(_PANELS_IN_A_ROW, len(shown)))
        left, top = column * (width + _GAP_PX), line * (height + _LINE_PX + 6) + _LINE_PX
        _frame(canvas, (row, col), grid, (left, top, width, height))
    return canvas


def _frame(canvas: Canvas, place: Pair, grid: Pair, photo: tuple[float, float, float, float]) -> None:
    """A line around a patch of a photo that is drawn at left, top, width, height."""
    left, top, width, height = photo
    wide, high = width / grid[1], height / grid[0]
    box = (left + place[1] * wide, top + place[0] * high, wide, high)
    for colour, thick in zip(_FRAME_COLOURS, (5.0, 2.5), strict=True):
        canvas.frame(box, colour=colour, width=thick)


def _panel_size(photo_CYX: Tensor, side: int) -> Pair:
    """Width and height of a panel: the longer side of the photo has `side`."""
    rows, cols = photo_CYX.shape[1:]
    return round(side * cols / max(rows, cols)), round(side * rows / max(rows, cols))


def _photo(photo_CYX: Tensor) -> Image.Image:
    return to_picture(photo_CYX, scale=whole_zoom(*photo_CYX.shape[1:])).convert("RGB")


def _drawn(photo_CYX: Tensor, values_YX: Tensor, scale: Scale) -> Image.Image:
    return overlay(photo_CYX, values_YX, scale, zoom=whole_zoom(*photo_CYX.shape[1:]))
