"""The page of `vitlab inspect`: the viewer first, then maps with their checks, then the paper's figures and later ones.

Letters: B photos, L layers, H heads, T tokens, Y X grid.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vitlab.core.errors import amount
from vitlab.engines.classifier import describe_model
from vitlab.engines.inspecting import Inspected, Photos, Request, sharp_view
from vitlab.inspection.attention import AttentionStatistics, place_number, unit_maps
from vitlab.inspection.canvas import Canvas
from vitlab.inspection.faithfulness import Curves, Verdict
from vitlab.inspection.meanings import MEANINGS, Meaning, meanings_of
from vitlab.inspection.overlays import Look, overlay, to_picture, whole_zoom
from vitlab.inspection.scales import Scale, measured
from vitlab.models.names import format_name
from vitlab.models.results import AttentionLayer
from vitlab.models.spec import Pair
from vitlab.report import inspection_figures as figures
from vitlab.report.chart_pixels import chart_pixels
from vitlab.report.charts import Chart
from vitlab.report.figures import jpeg, png
from vitlab.report.inspection_tables import cross_cka, verdicts
from vitlab.report.page import (
    Figure,
    Files,
    Gallery,
    Report,
    Section,
    Sheets,
    Snippets,
    Table,
    Tile,
    percent,
)
from vitlab.report.viewer import CAPTION, PhotoAttention, ViewedModel, ViewedPhoto, Viewer, cell_size, pack_attention

_FILTERS_IN_A_ROW = 8  # of a first convolution: most have 32 or 64
_MOST_UNITS = 5  # whose attention is shown beside a photo
_TILE_PX, _VIEWED_PX = 384, 512  # the longer side of a map, and of a photo in the viewer


@dataclasses.dataclass(frozen=True)
class _Subject:
    """One model with its photos, as sharp as they are, for drawing."""

    one: Inspected
    sharp: Sequence[Tensor]  # uint8 [C, Y, X] of each photo: what the model sees of it
    suffix: str  # for the names of files, empty for the first model
    title: str  # behind the titles of sections, empty where there is one model


class _Pages:
    """Sections, and the files that are written beside the page."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.files: dict[str, bytes] = {}

    def figure(self, name: str, title: str, caption: str, canvas: Canvas) -> None:
        """A figure on the page, and as two files."""
        self.sections.append(Figure(title, caption, self.keep(name, canvas)))

    def keep(self, name: str, canvas: Canvas) -> bytes:
        drawn = canvas.svg()
        self.files |= {f"{name}.svg": drawn, f"{name}.png": png(canvas.pixels())}
        return drawn

    def chart(self, name: str, chart: Chart) -> None:
        self.sections.append(chart)
        self.files |= {f"{name}.svg": chart.file(), f"{name}.png": png(chart_pixels(chart))}


def build_inspection_page(
    found: Sequence[Inspected], photos: Photos, request: Request, command: str
) -> tuple[Report, dict[str, bytes]]:
    """The page, and the pictures as files by name."""
    pages = _Pages()
    subjects = [
        _Subject(
            one,
            [sharp_view(source, one.classifier.preprocess) for source in photos.sources],
            suffix,
            f": {one.name}" if len(found) > 1 else "",
        )
        for one, suffix in zip(found, ("", "-b"), strict=False)
    ]
    viewed = [subject for subject in subjects if subject.one.shows("viewer", request)]
    if photos and viewed:
        pages.sections.append(_viewer(viewed, photos))
    for subject in subjects:
        _saliency(pages, subject, photos, request)
        if photos and subject.one.shows("heads", request):
            draw = _heads if subject.one.spec.has_attention_maps else _grid_heads
            draw(pages, subject, photos, request)
    _charts(pages, subjects, request)
    for subject in subjects:
        _weights(pages, subject)
        _features(pages, subject)
    _depth(pages, subjects, photos)
    pages.sections += [_use(command, found[0]), _files(pages.files)]
    return _report(found, photos, pages.sections), pages.files


# --- the viewer -------------------------------------------------------------------------------------------------------


def _viewer(subjects: Sequence[_Subject], photos: Photos) -> Viewer:
    models = [_viewed_model(subject.one, len(photos), len(subjects)) for subject in subjects]
    shown = [
        ViewedPhoto(
            name=_short(name),
            picture=_picture(subjects[0].sharp[i], _VIEWED_PX),
            attention=tuple(_attention(subject.one, model, i) for subject, model in zip(subjects, models, strict=True)),
            second=_second_picture(subjects, i),
        )
        for i, name in enumerate(photos.names)
    ]
    return Viewer("Attention", CAPTION, models, shown)


def _second_picture(subjects: Sequence[_Subject], i: int) -> bytes | None:
    """What the second model saw of a photo, where that is not what the first one saw."""
    first_CYX, last_CYX = subjects[0].sharp[i], subjects[-1].sharp[i]
    return None if torch.equal(first_CYX, last_CYX) else _picture(last_CYX, _VIEWED_PX)


def _viewed_model(one: Inspected, photos: int, models: int) -> ViewedModel:
    spec = one.vit.spec
    prefix = one.tokens[: spec.num_prefix]
    model = ViewedModel(one.name, tuple(range(spec.num_blocks)), spec.heads, prefix, one.grid)
    return dataclasses.replace(model, cell=cell_size(model, photos, models=models))


def _attention(one: Inspected, model: ViewedModel, i: int) -> PhotoAttention:
    answers = one.predictions[i] if one.predictions else ()
    layers = one.model.attention_layers(one.pixels(i))
    packed = [pack_attention(weights_BHTT[0], one.grid, len(model.prefix), model.cell) for _, weights_BHTT in layers]
    return PhotoAttention(tuple((each.label, each.p) for each in answers), tuple(packed))


# --- saliency, and whether it means anything --------------------------------------------------------------------------


def _saliency(pages: _Pages, subject: _Subject, photos: Photos, request: Request) -> None:
    maps = subject.one.maps
    if maps is None:
        return
    tiles: list[Tile] = []
    for i, name in enumerate(photos.names):
        heat = {method: heat_BYX[i] for method, heat_BYX in maps.heat_BYX.items()}
        pages.keep(f"saliency-{i + 1}{subject.suffix}", figures.saliency_row(subject.sharp[i], heat))
        tiles.append(Tile(_picture(subject.sharp[i], _TILE_PX), _answer(subject.one, i) or _short(name), None))
        tiles += [_map_tile(subject.sharp[i], heat_YX, method) for method, heat_YX in heat.items()]
    score = (
        "Each map is about the class below its photo."
        if subject.one.explained
        else "The model has no head: the maps are about the photo's own representation, in place of a class."
    )
    caption = (
        f"{score}{_rolled(request)} Colours begin where a patch gets more than the mean of all patches, and end at the "
        "number below the map; of Grad-CAM, from nothing to its strongest patch. No map is a proof: the table below tests them."
    )
    in_a_row = (6, 2) if len(maps.heat_BYX) > 2 else (6, 3)  # a photo is never parted from one or two maps
    pages.sections.append(Gallery(f"Saliency maps{subject.title}", caption, tiles, photos=True, in_a_row=in_a_row))
    pages.sections.append(_checks(subject))
    for kind in ("deletion", "insertion"):
        by_map = {MEANINGS[method].title: _mean_curve(curves, kind) for method, curves in maps.curves.items()}
        title = f"{kind.capitalize()} curves{subject.title}"
        chart = figures.curves_chart(title, maps.random.fractions, by_map, _mean_curve(maps.random, kind))
        pages.chart(f"{kind}{subject.suffix}", chart)


def _rolled(request: Request) -> str:
    """How attention was rolled out, where that is not the usual way."""
    ways = [] if request.depth is None else [f"through the first {request.depth} layers alone"]
    ways += [] if request.add_identity else ["without the residual path"]
    return f" Attention rollout goes {' and '.join(ways)}." if ways else ""


def _map_tile(photo_CYX: Tensor, heat_YX: Tensor, method: str) -> Tile:
    values_YX, scale = measured(heat_YX, MEANINGS[method].unit)
    drawn = overlay(photo_CYX, values_YX, scale, zoom=whole_zoom(*photo_CYX.shape[1:]))
    return Tile(jpeg(drawn, _TILE_PX), f"{MEANINGS[method].title}\nto {_end(scale)}", None)


def _end(scale: Scale) -> str:
    """The value that has the last colour; a few patches may lie beyond it."""
    return scale.ticks()[-1][1].removeprefix("≥ ")


def _checks(subject: _Subject) -> Table:
    """Whether each map finds what the score depends on, and whether it would look the same for any weights."""
    maps = subject.one.maps
    assert maps is not None
    rows = [
        (MEANINGS[method].title, *_areas(maps.curves[method]), *_judged(each))
        for method, each in verdicts(subject.one).items()
    ]
    caption = (
        "Deletion: the area under the score while patches are blurred, those that the map marks first; the lower, the better. "
        "Insertion: the same while they come back; the higher, the better. Random weights: the rank correlation with the map "
        "of a model that has learnt nothing, whatever its sign; near 1, a map shows the photo and not the model."
    )
    words = meanings_of(has_tokens=subject.one.spec.has_attention_maps)
    notes = [_named(words[method]) for method in maps.curves]
    return Table(
        f"Do the maps mean anything?{subject.title}",
        caption,
        ("map", "deletion", "insertion", "random weights", "verdict"),
        [*rows, ("patches in random order", *_areas(maps.random), "", "what a map has to beat")],
        notes,
    )


def _named(meaning: Meaning) -> str:
    return meaning.caption if meaning.caption.startswith(meaning.title) else f"{meaning.title}: {meaning.caption}"


def _areas(curves: Curves) -> tuple[str, str]:
    return f"{float(curves.deletion_area_B.mean()):.3f}", f"{float(curves.insertion_area_B.mean()):.3f}"


def _judged(each: Verdict) -> tuple[str, str]:
    """Rank correlation, and the verdict in a few words."""
    verdict = {
        True: "finds what the score depends on",
        False: "no better than patches at random: do not read an explanation into it",
        None: "too few photos",
    }[each.beats_random]
    if each.follows_weights is False:
        verdict += "; much the same for random weights, so it shows the photo and not the model"
    return ("" if each.rank_correlation is None else f"{each.rank_correlation:.2f}"), verdict


def _mean_curve(curves: Curves, kind: str) -> list[float]:
    return getattr(curves, f"{kind}_BF").float().mean(dim=0).tolist()


def _answer(one: Inspected, i: int) -> str:
    if not one.predictions:
        return ""
    first, explained = one.predictions[i][0], one.explained[i] if one.explained else ""
    caption = f"{first.label} ({percent(first.p, 0)})"
    return caption if explained in ("", first.label) else f"{caption}\nexplained: {explained}"


def _picture(photo_CYX: Tensor, side: int) -> bytes:
    return jpeg(to_picture(photo_CYX, scale=whole_zoom(*photo_CYX.shape[1:])), side)


# --- head maps --------------------------------------------------------------------------------------------------------


def _heads(pages: _Pages, subject: _Subject, photos: Photos, request: Request) -> None:
    """Every head of some layers, for the first photo; the viewer has all of them."""
    one, spec = subject.one, subject.one.spec
    layers = request.layers if request.layers is not None else sorted({0, spec.num_blocks // 2, spec.num_blocks - 1})
    query, origin = _query(one, request.query)
    maps = one.model.attention(one.pixels(0), layers=list(layers), heads=request.heads, queries=[query])
    sheets: list[Tile] = []
    for layer, weights_BHQT in maps.layers.items():
        heat_HYX = weights_BHQT[0, :, 0, maps.num_prefix :].reshape(-1, *one.grid).cpu()
        sheet = figures.head_sheet(subject.sharp[0], heat_HYX, layer, tokens=len(one.tokens), heads=maps.heads)
        sheets.append(Tile(pages.keep(f"heads-layer-{layer + 1}{subject.suffix}", sheet), f"Layer {layer + 1}", None))
    caption = f"Photo {_short(photos.names[0])}, looked at from {origin}. {MEANINGS['head'].caption}"
    pages.sections.append(Sheets(f"Heads{subject.title}", caption, sheets))


def _query(one: Inspected, place: Sequence[int] | None) -> tuple[int, str]:
    """The number of a token, and what it is."""
    rows, cols = one.grid
    if place is None and one.vit.spec.uses_cls:
        return 0, "the class token"
    row, col = (rows // 2, cols // 2) if place is None else place
    return one.vit.spec.num_prefix + row * cols + col, f"patch ({row}, {col})"


def _grid_heads(pages: _Pages, subject: _Subject, photos: Photos, request: Request) -> None:
    """The same where every layer has a grid of its own: units on each photo, and the heads of some for the first photo."""
    one, words = subject.one, meanings_of(has_tokens=False)
    geometry = one.model.attention_geometry(one.classifier.preprocess.image_size)
    units = tuple(dict.fromkeys(layer.unit for layer in geometry))
    if request.layers is not None:
        units = tuple(dict.fromkeys(geometry[layer].unit for layer in request.layers))
    (rows, cols), (row, col) = one.grid, request.query or (one.grid[0] // 2, one.grid[1] // 2)
    place = (row + 0.5) / rows, (col + 0.5) / cols
    shown = _evenly(units, _MOST_UNITS)
    sheets: list[Tile] = []
    for i, name in enumerate(photos.names):
        found = unit_maps(one.model, one.pixels(i), place, shown)
        heat = {f"{layer.unit}, {_by(layer.key_grid)}": heat_BYX[0].cpu() for layer, heat_BYX in found}
        row_sheet = figures.saliency_row(subject.sharp[i], heat, framed=((row, col), one.grid))
        sheets.append(Tile(pages.keep(f"attention-{i + 1}{subject.suffix}", row_sheet), _short(name), None))
    caption = f"Looked at from the framed place, ({row}, {col}) of {_by(one.grid)}. {words['unit'].caption}"
    pages.sections.append(Sheets(f"Attention{subject.title}", caption, sheets))
    if one.spec.attention_shape[1] == 1:
        return  # the only head is what the unit has
    layers = request.layers
    if layers is None:
        some = _evenly(units, 3)
        layers = [i for i, layer in enumerate(geometry) if layer.unit in some]
    sheets = []
    for found in one.model.attention_on_grids(one.pixels(0), layers=list(layers), heads=request.heads):
        layer, number = found.layer, found.index + 1
        heat_HYX = _widened(found.maps([place_number(layer.grid, place)])[0, :, 0].cpu(), layer, (row, col), one.grid)
        sheet = figures.head_sheet(subject.sharp[0], heat_HYX, found.index, tokens=layer.num_keys, heads=found.heads)
        title = f"Layer {number}: {layer.name}, {_by(layer.grid)}"
        sheets.append(Tile(pages.keep(f"heads-layer-{number}{subject.suffix}", sheet), title, None))
    wide = " Lines are drawn as wide as the framed place." if any(layer.axis is not None for layer in geometry) else ""
    caption = f"Photo {_short(photos.names[0])}, looked at from the same place.{wide} {words['head'].caption}"
    pages.sections.append(Sheets(f"Heads{subject.title}", caption, sheets))


def _widened(heat_HYX: Tensor, layer: AttentionLayer, place: Pair, grid: Pair) -> Tensor:
    """A line as wide as a place of the last grid: a single column of 56 could hardly be seen on a photo."""
    if layer.axis is None:
        return heat_HYX
    across = 1 - layer.axis  # the direction in which the line has no width
    side, size = grid[across], layer.grid[across]
    first, end = place[across] * size // side, -(-(place[across] + 1) * size // side)
    inside = (torch.arange(size) >= first) & (torch.arange(size) < end)
    line = heat_HYX.sum(dim=1 + across, keepdim=True)  # it is zero off the line
    return line * (inside[:, None] if across == 0 else inside)


def _evenly(names: Sequence[str], most: int) -> tuple[str, ...]:
    """The first, the last, and some between them."""
    if len(names) <= most:
        return tuple(names)
    return tuple(names[round(i * (len(names) - 1) / (most - 1))] for i in range(most))


def _by(grid: Sequence[int]) -> str:
    return f"{grid[0]}x{grid[1]}"


# --- charts over depth ------------------------------------------------------------------------------------------------


def _charts(pages: _Pages, subjects: Sequence[_Subject], request: Request) -> None:
    found = [subject.one for subject in subjects]
    measured_by = {one.name: one.statistics for one in found if one.statistics is not None}
    if not measured_by:
        return
    first = next(iter(measured_by.values()))
    if "distance" in request.figures:
        distance = figures.distance_chart(
            {name: each.distance_LH for name, each in measured_by.items()},
            {name: each.uniform_distance_L for name, each in measured_by.items()},
        )
        note = f" Over {first.images:,} images."
        if any(one.spec.has_attention_maps for one in found):
            note += (
                " The class token and registers are left out, and what goes to the patches counts as the whole; arrays.npz has "
                "the other convention too."
            )
        pages.chart("attention-distance", dataclasses.replace(distance, caption=distance.caption + note))
    if "entropy" in request.figures:
        entropy = {name: each.entropy_LH for name, each in measured_by.items()}
        uniform = {name: each.uniform_entropy_L for name, each in measured_by.items()}
        pages.chart("attention-entropy", figures.entropy_chart(entropy, uniform))
    for subject in subjects:
        if subject.one.statistics is not None and not subject.one.spec.has_attention_maps:
            pages.sections.append(_layer_table(f"Layers that attend{subject.title}", subject.one.statistics))


def _layer_table(title: str, found: AttentionStatistics) -> Table:
    """Where each layer stands and what it can see, since grids shrink with depth."""
    sees = {None: "all keys", 0: "its column", 1: "its row"}
    rows = [
        (
            *(f"{number}", layer.name, _by(layer.grid), f"{layer.stride} px", f"{sees[layer.axis]}: {layer.num_keys}"),
            *(f"{float(found.distance_LH[number - 1].mean()):.0f} px", f"{uniform:.0f} px"),
        )
        for number, (layer, uniform) in enumerate(zip(found.layers, found.uniform_distance_L, strict=True), start=1)
    ]
    caption = (
        "Grids shrink with depth, so each layer has its own: how far its places are apart, what each of them sees, how far it "
        "looks (mean of the heads), and how far it would look if it saw all of that alike."
    )
    header = ("layer", "name", "grid", "stride", "a place sees", "distance", "uniform")
    return Table(title, caption, header, rows)


def _depth(pages: _Pages, subjects: Sequence[_Subject], photos: Photos) -> None:
    found = [subject.one for subject in subjects]
    for subject in subjects:
        charts: dict[str, Chart] = {}
        if (norms := subject.one.norms) is not None:
            charts["token-norms"] = figures.norms_chart(norms.norms_LBT, norms.num_prefix, norms.thresholds_L)
        if subject.one.lens is not None:
            charts["lens"] = _lens(subject.one, photos)
        for name, chart in charts.items():
            pages.chart(f"{name}{subject.suffix}", dataclasses.replace(chart, title=chart.title + subject.title))
    if all(one.layers is not None for one in found):
        images = found[0].layers.layers[0].shape[0] if found[0].layers else 0
        names = [one.name for one in found]
        sheet = figures.cka_sheet(cross_cka(found), names[0], names[-1] if len(names) > 1 else "")
        few = " With so few images, read it with care." if images < 32 else ""
        caption = (
            f"How alike the representations of every two layers are (debiased linear CKA), over {images:,} images.{few}"
        )
        pages.figure("cka", "CKA between layers", caption, sheet)


def _lens(one: Inspected, photos: Photos) -> Chart:
    assert one.lens is not None
    names = [_short(name) for name in photos.names]
    if one.lens.logits_LBK is None:
        return figures.lens_chart(one.lens.similarity_LB, names, of_answer=False)
    bundle = one.classifier.bundle
    scaled_LBK = one.lens.logits_LBK / bundle.temperature
    p_LBK = scaled_LBK.sigmoid() if bundle.thresholds else scaled_LBK.softmax(dim=2)
    final_B = one.lens.logits_LBK[-1].argmax(dim=1)
    return figures.lens_chart(p_LBK.gather(2, final_B.expand(len(p_LBK), -1)[..., None])[..., 0], names)


# --- what was learnt, and what patches hold ---------------------------------------------------------------------------


def _weights(pages: _Pages, subject: _Subject) -> None:
    one = subject.one
    if (filters := one.filters) is not None:
        count, share = len(filters.components_KCPP), float(filters.explained_K.sum())
        caption = (
            f"The first {count} principal components of the {filters.source}: {percent(share, 0)} of the filters' variance "
            "(Figure 7, left). A trained model has smooth ones; of noise, all look alike."
        )
        sheet = figures.filters_sheet(filters.components_KCPP)
        if filters.filters_DCPP is not None:
            caption = (
                f"All {len(filters.filters_DCPP)} filters of the {filters.source}, as they are applied to red, green and "
                "blue. A trained model has edges and colours; of noise, all look alike."
            )
            sheet = figures.filters_sheet(filters.filters_DCPP, columns=_FILTERS_IN_A_ROW)
        pages.figure(f"filters{subject.suffix}", f"Filters{subject.title}", caption, sheet)
    if (positions := one.positions) is not None:
        caption = (
            "Each map shows how alike one patch's position is to all others (Figure 7, centre, and Figure 10): "
            f"{positions.note}."
        )
        sheet = figures.position_sheet(positions.similarity_YXYX)
        pages.figure(f"positions{subject.suffix}", f"Positions{subject.title}", caption, sheet)


def _features(pages: _Pages, subject: _Subject) -> None:
    one = subject.one
    if one.pca is not None:
        pages.keep(f"features{subject.suffix}", figures.pca_sheet(subject.sharp, one.pca.colours_BYX3))
        caption = (
            "The first three principal components of all patches as red, green and blue: what is alike to the model has one "
            f"colour, in all photos. They are {percent(float(one.pca.explained_3.sum()), 0)} of the variance."
        )
        tiles: list[Tile] = []
        for photo_CYX, colours_YX3 in zip(subject.sharp, one.pca.colours_BYX3, strict=True):
            size = (photo_CYX.shape[1], photo_CYX.shape[2])
            zoom = whole_zoom(*size)
            drawn = figures.pca_picture(colours_YX3, (zoom * size[0], zoom * size[1]))
            tiles += [Tile(_picture(photo_CYX, _TILE_PX), "", None), Tile(jpeg(drawn, _TILE_PX), "", None)]
        pages.sections.append(Gallery(f"Patch features{subject.title}", caption, tiles, photos=True))
    if one.norms is not None and one.norms.outliers_BYX.any():
        _outliers(pages, subject)
    if one.neighbours is not None:
        sheets: list[Tile] = []
        for number, query in enumerate(one.neighbours.queries):
            matches = [(tuple(match.patch), match.similarity) for match in one.neighbours.matches[number]]
            sheet = figures.nearest_sheet(subject.sharp, one.grid, tuple(query), matches)  # pyright: ignore[reportArgumentType]
            sheets.append(Tile(pages.keep(f"neighbours-{number + 1}{subject.suffix}", sheet), "", None))
        caption = (
            "A patch, and in every other photo the one that is most like it to the model, by the cosine of their features. "
            "Chosen by the program: patches whose counterparts stand out most."
        )
        pages.sections.append(Sheets(f"Nearest patches{subject.title}", caption, sheets))


def _outliers(pages: _Pages, subject: _Subject) -> None:
    """Where the tokens with an unusual norm are, which later maps often show as isolated spots."""
    norms = subject.one.norms
    assert norms is not None
    layer = norms.layer
    norms_BYX = norms.norms_LBT[layer, :, norms.num_prefix :].reshape(-1, *norms.grid)
    tiles: list[Tile] = []
    for photo_CYX, norms_YX, count in zip(subject.sharp, norms_BYX, norms.counts, strict=True):
        values_YX, scale = measured(norms_YX)
        drawn = overlay(photo_CYX, values_YX, scale, look=Look(smooth=False), zoom=whole_zoom(*photo_CYX.shape[1:]))
        tiles.append(Tile(jpeg(drawn, _TILE_PX), f"{count} outliers, to {_end(scale)}", None))
    caption = (
        f"The norm of each patch's token after layer {layer + 1}, in units of their mean. Single patches of plain background "
        "with a large norm no longer hold what they show: the model keeps something of the whole photo there. In "
        "attention maps they are spots that mean nothing about their place; models with registers have hardly any."
    )
    pages.sections.append(Gallery(f"Token norms on the photos{subject.title}", caption, tiles, photos=True))


# --- the rest of the page ---------------------------------------------------------------------------------------------


def _use(command: str, one: Inspected) -> Snippets:
    title, python = (
        "One layer's weights in Python",
        'maps = vitlab.load("MODEL").model.attention(x, layers=[-1], queries="cls")',
    )
    if not one.spec.attention_shape[0]:
        title, python = "One photo's map in Python", 'vitlab.load("MODEL").explain("photo.jpg", "grad-cam").figure()'
    elif not one.spec.has_attention_maps:
        python = 'maps = next(vitlab.load("MODEL").model.attention_on_grids(x, layers=[-1]))'
    return Snippets("Repeat it", "", [("On the command line", command), (title, python)])


def _files(names: Iterable[str]) -> Files:
    links = [("inspection.json", "numbers and verdicts"), ("arrays.npz", "every array behind the figures")]
    return Files("Files", "Beside this page.", [*links, *((name, "figure") for name in names if name.endswith(".png"))])


def _report(found: Sequence[Inspected], photos: Photos, sections: Sequence[Section]) -> Report:
    one = found[0]
    names = " and ".join(each.name for each in found)
    judged = verdicts(one)
    good = [MEANINGS[method].title for method, each in judged.items() if each.means_something]
    warnings = [f"{each.name}: {why}" for each in found for why in dict.fromkeys(each.missing.values())]
    stats = [("photos", f"{len(photos)}")] if photos else []
    if judged:
        stats.append(("maps that pass both checks", f"{len(good)} of {len(judged)}"))
    if one.statistics is not None:
        stats.append(("images measured", f"{one.statistics.images:,}"))
        low, high = (float(one.statistics.distance_LH[layer].mean()) for layer in (0, -1))
        stats.append(("attention distance, first to last layer", f"{low:.0f} to {high:.0f} px"))
    if one.norms is not None:
        layer = one.norms.layer
        count = int(one.norms.outliers_LBYX[layer].sum())
        stats.append(("norm outliers", f"{count:,} patches, layer {layer + 1}" if count else "none"))
    facts = [("model", f"{each.name}: {describe_model(each.classifier)}") for each in found]
    facts += [("photo", name) for name in photos.names]
    return Report(
        title=names,
        headline=f"Inside {names}",
        subline=_subline(one),
        facts=facts,
        sections=sections,
        footer="numbers in inspection.json, arrays in arrays.npz",
        warnings=warnings,
        stats=stats,
    )


def _subline(one: Inspected) -> str:
    spec, (layers, heads) = one.spec, one.spec.attention_shape
    if spec.has_attention_maps:
        return f"{format_name(spec)}: {layers} layers of {heads} heads on {_by(one.grid)} patches"
    text = f"{format_name(spec)}: {spec.num_blocks} stages down to a grid of {_by(one.grid)}"
    return text + (f"; {layers} layers that attend, of {amount(heads, 'head')}" if layers else "")


def _short(name: str) -> str:
    return name.replace("\\", "/").rsplit("/", 1)[-1]
