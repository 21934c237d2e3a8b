"""Figures of inspection: numbers stand where they belong, files are well-formed and the same every time."""

import base64
import io
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.inspection.canvas import Canvas
from vitlab.inspection.colours import table
from vitlab.report import inspection_figures as figures
from vitlab.report.charts import Chart


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def photos(count: int = 3, size: tuple[int, int] = (112, 140)) -> torch.Tensor:
    return (255 * noise(count, 3, *size)).byte()


SHEETS: dict[str, Callable[[], Canvas]] = {
    "filters": lambda: figures.filters_sheet(noise(28, 3, 14, 14) - 0.5),
    "positions": lambda: figures.position_sheet(2 * noise(3, 4, 3, 4) - 1),
    "cka": lambda: figures.cka_sheet(noise(12, 6), "first", "second"),
    "saliency": lambda: figures.saliency_row(photos()[0], {"rollout": noise(8, 10), "grad-cam": noise(8, 10)}),
    "heads": lambda: figures.head_sheet(photos()[0], noise(8, 8, 10) / 80, 4, tokens=81),
    "pca": lambda: figures.pca_sheet(list(photos()), noise(3, 8, 10, 3)),
    "nearest": lambda: figures.nearest_sheet(list(photos()), (8, 10), (0, 2, 3), [((1, 0, 0), 0.5), ((2, 7, 9), 0.25)]),
}
CHARTS: dict[str, Callable[[], Chart]] = {
    "distance": lambda: figures.distance_chart(
        {"plain": 100 * noise(12, 6), "hybrid": 100 * noise(12, 12)}, {"plain": [116.49] * 12, "hybrid": [116.49] * 12}
    ),
    "entropy": lambda: figures.entropy_chart({"plain": 8 * noise(12, 6)}, {"plain": [8.0] * 12}),
    "norms": lambda: figures.norms_chart(noise(12, 3, 30), 5, torch.full((12,), 2.0)),
    "lens": lambda: figures.lens_chart(noise(12, 2), ["a.jpg", "b.jpg"]),
    "curves": lambda: figures.curves_chart("Deletion", [0, 0.5, 1], {"rollout": [1, 0.5, 0]}, [1, 0.8, 0]),
}


def elements(svg: bytes) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def texts(svg: bytes) -> list[str]:
    return ["".join(node.itertext()) for node in elements(svg) if node.tag.endswith("text")]


def pictures(svg: bytes) -> list[Image.Image]:
    data = [node.get("href") or "" for node in elements(svg) if node.tag.endswith("image")]
    return [Image.open(io.BytesIO(base64.b64decode(each.split(",")[1]))) for each in data]


@pytest.mark.parametrize("name", SHEETS)
def test_sheet_is_the_same_in_both_forms_and_every_time(name: str) -> None:
    sheet, again = SHEETS[name](), SHEETS[name]()
    root = ElementTree.fromstring(sheet.svg())
    drawn = sheet.pixels()
    assert drawn.size == pytest.approx((2 * float(root.get("width") or 0), 2 * float(root.get("height") or 0)), abs=1)
    assert sheet.svg() == again.svg() and drawn.tobytes() == again.pixels().tobytes()
    assert np.asarray(drawn).std() > 10, "something is drawn"


@pytest.mark.parametrize("name", CHARTS)
def test_chart_is_well_formed_and_the_same_every_time(name: str) -> None:
    chart = CHARTS[name]()
    assert chart.file() == CHARTS[name]().file()
    assert {chart.x_label, chart.y_label} <= set(texts(chart.file()))


# --- filters, positions, similarity of layers -------------------------------------------------------------------------


def test_filters_stand_in_rows_of_seven_with_zero_in_the_middle_grey() -> None:
    components = torch.zeros(28, 1, 2, 2)
    components[:, 0, 0, 1], components[:, 0, 1, 0] = 3.0, -1.5
    sheet = figures.filters_sheet(components)
    assert (sheet.width, sheet.height) == (7 * 68 - 4, 4 * 68 - 4)
    first = pictures(sheet.svg())[0]
    assert np.asarray(first).tolist() == [[128, 255], [64, 128]]
    assert len(pictures(figures.filters_sheet(noise(5, 3, 4, 4)).svg())) == 5
    assert figures.filters_sheet(torch.zeros(1, 4, 3, 3)).pixels().getpixel((20, 20)) == (128, 128, 128)


def test_map_of_a_patch_stands_at_its_place() -> None:
    similarity_YXYX = torch.full((2, 3, 2, 3), -1.0)
    similarity_YXYX[1, 2, 0, 1] = 1.0  # the last patch is like the one above and before it
    svg = figures.position_sheet(similarity_YXYX).svg()
    maps = np.asarray(pictures(svg)[0].convert("RGBA"))
    zoom, gap = 93, 4
    assert maps.shape == (2 * 2 * zoom + gap, 3 * 3 * zoom + 2 * gap, 4)
    top, left = 2 * zoom + gap, 2 * (3 * zoom + gap)
    assert maps[top + zoom // 2, left + zoom + zoom // 2].tolist() == [*table("viridis")[-1].tolist(), 255]
    assert maps[top + zoom + zoom // 2, left + zoom + zoom // 2].tolist() == [*table("viridis")[0].tolist(), 255]
    assert maps[2 * zoom + 1, 5, 3] == 0, "between two maps nothing is drawn"
    assert {"input patch row", "input patch column", "cosine similarity", "-1", "0", "1"} <= set(texts(svg))


def test_of_a_large_grid_some_maps_are_shown_with_their_numbers() -> None:
    svg = figures.position_sheet(noise(20, 20, 20, 20)).svg()
    assert {"1", "3", "19"} <= set(texts(svg)) and "2" not in texts(svg)
    assert len(svg) < 100_000


def test_layers_of_a_similarity_are_counted_from_the_lower_left_corner() -> None:
    similarity_LL = torch.zeros(4, 6)
    similarity_LL[0, 1] = 1.0
    svg = figures.cka_sheet(similarity_LL, "plain", "hybrid").svg()
    pixels = np.asarray(pictures(svg)[0])
    zoom = pixels.shape[1] // 6
    assert pixels[-1, zoom + 1].tolist() == table("magma")[-1].tolist()
    assert (pixels[: 3 * zoom].reshape(-1, 3) == table("magma")[0]).all()
    assert {"layer of plain", "layer of hybrid", "linear CKA", "0.5"} <= set(texts(svg))


# --- charts -----------------------------------------------------------------------------------------------------------


def test_every_head_has_a_dot_and_uniform_attention_a_line_with_its_name() -> None:
    chart = figures.distance_chart({"ViT": torch.tensor([[10.0, 20.0], [30.0, 50.0]])}, {"ViT": [116.49] * 2})
    dots = [node for node in elements(chart.file()) if node.tag.endswith("circle") and node.get("cy") != "9"]
    assert len(dots) == 4, "those of the legend stand above"
    assert "uniform attention (116.5 pixels)" in texts(chart.file())
    means = next(one for one in chart.series if "mean" in one.name)
    assert list(means.points) == [(1, 15), (2, 40)]


def test_dots_of_two_models_stand_beside_each_other() -> None:
    chart = CHARTS["distance"]()
    plain, hybrid = (one for one in chart.series if one.mark == "points")
    assert plain.points[0][0] < 1 < hybrid.points[0][0] and len(hybrid.points) == 144
    assert (plain.name, hybrid.name) == ("plain: heads", "hybrid: heads")


def test_norms_distinguish_patches_from_the_tokens_before_them() -> None:
    norms_LBT = torch.ones(2, 1, 5)
    norms_LBT[1, 0] = torch.tensor([7.0, 5.0, 2.0, 3.0, 40.0])
    last = {one.name: one.points[-1][1] for one in figures.norms_chart(norms_LBT, 2).series}
    assert last == {"largest patch": 40, "median patch": 3, "class token": 7, "registers": 5}


def test_lens_without_a_head_speaks_of_similarity() -> None:
    assert CHARTS["lens"]().y_label == "probability of the final answer"
    assert figures.lens_chart(noise(3, 1) - 0.5, ["a"], of_answer=False).y_label == "cosine to the last layer"


def test_curves_have_the_random_order_beside_them() -> None:
    chart = CHARTS["curves"]()
    assert [(one.name, one.mark) for one in chart.series] == [
        ("rollout", "dots"),
        ("patches in random order", "dashed"),
    ]
    assert "falls sooner" in chart.caption
    assert "rises sooner" in figures.curves_chart("Insertion", [0, 1], {}, [0, 1]).caption


# --- photos -----------------------------------------------------------------------------------------------------------


def test_row_of_maps_has_a_title_and_a_legend_for_each() -> None:
    printed = texts(SHEETS["saliency"]().svg())
    assert {"photo", "Attention rollout", "Grad-CAM", "of the strongest patch"} <= set(printed)
    assert any(text.startswith("times the mean patch") for text in printed)
    first, *others = pictures(SHEETS["saliency"]().svg())
    assert first.size == (140, 112) and sum(one.size == (140, 112) for one in others) == 2


def test_heads_are_numbered_from_one_and_share_a_scale() -> None:
    weights_HYX = torch.full((2, 4, 4), 1 / 17)
    weights_HYX[1, 2, 2] = 0.5
    black = torch.zeros(3, 100, 100, dtype=torch.uint8)
    sheet = figures.head_sheet(black, weights_HYX, 0, tokens=17)
    assert {"layer 1, head 1", "layer 1, head 2"} <= set(texts(sheet.svg()))
    first, second = (np.asarray(picture) for picture in pictures(sheet.svg())[:2])
    assert first.max() == 0 and second[62, 62].max() > 150, "attention like any other's is not drawn"


def test_colours_of_patches_are_crisp() -> None:
    colours_YX3 = torch.zeros(2, 2, 3)
    colours_YX3[0, 1] = torch.tensor([1.0, 0.5, 0.0])
    crisp = np.asarray(figures.pca_picture(colours_YX3, (20, 40)))
    assert crisp.shape == (20, 40, 3)
    assert (crisp[:10, 20:] == [255, 128, 0]).all() and not crisp[10:].any()


def test_nearest_patches_are_framed_where_they_are() -> None:
    black = [torch.zeros(3, 80, 100, dtype=torch.uint8)] * 2
    sheet = figures.nearest_sheet(black, (8, 10), (0, 2, 3), [((1, 7, 9), 0.25)])
    assert texts(sheet.svg()) == ["query: patch (2, 3)", "cosine 0.25"]
    orange_YX = (np.asarray(sheet.pixels(1)).astype(int) - [0xE8, 0x59, 0x0C] == 0).all(axis=2)
    top = 6 + 1.4 * 12  # the margin, and the titles
    for left, row, col in ((6, 2, 3), (6 + 210, 7, 9)):
        rows, cols = np.nonzero(orange_YX[:, left - 3 : left + 204])
        assert (rows.min() + rows.max()) / 2 == pytest.approx(top + 20 * (row + 0.5), abs=2)
        assert (cols.min() + cols.max()) / 2 - 3 == pytest.approx(20 * (col + 0.5), abs=2)


def test_head_sheet_names_the_heads_that_it_shows() -> None:
    sheet = figures.head_sheet(photos()[0], noise(2, 8, 10) / 80, 4, tokens=81, heads=[2, 5])
    assert {"layer 5, head 3", "layer 5, head 6"} <= set(texts(sheet.svg()))


def test_each_model_has_its_own_level_of_uniform_attention() -> None:
    by_model = {"plain": 10 * noise(2, 6), "fine": 10 * noise(3, 6)}
    same = figures.distance_chart(by_model, {"plain": [116.49] * 2, "fine": [116.49] * 3})
    assert [one.name for one in same.series if one.mark == "guide"] == ["uniform attention (116.5 pixels)"]
    other = figures.entropy_chart(by_model, {"plain": [4.0] * 2, "fine": [6.0] * 3})
    assert {one.name: one.points[0][1] for one in other.series if one.mark == "guide"} == {
        "plain: uniform attention (4 bits)": 4.0,
        "fine: uniform attention (6 bits)": 6.0,
    }
    assert "4 (plain) and 6 (fine) bits" in other.caption


def test_layers_on_grids_of_their_own_have_levels_of_their_own() -> None:
    chart = figures.distance_chart({"axial": 10 * noise(3, 6)}, {"axial": (74.6, 74.6, 74.3)})
    (guide,) = (one for one in chart.series if one.mark == "guide")
    assert guide.name == "uniform attention (74.3 to 74.6 pixels)"
    assert list(guide.points) == [(1, 74.6), (2, 74.6), (3, 74.3)]
    both = figures.distance_chart(
        {"axial": 10 * noise(3, 6), "deeper": 10 * noise(4, 6)}, {"axial": (7, 7, 6), "deeper": (7, 7, 7, 6)}
    )
    assert [len(one.points) for one in both.series if one.mark == "guide"] == [3, 4]


def test_the_place_that_attention_starts_from_is_framed_on_the_photo() -> None:
    row = figures.saliency_row(photos()[0], {"stage1/unit01": noise(4, 5)}, framed=((1, 2), (4, 5)))
    plain = figures.saliency_row(photos()[0], {"stage1/unit01": noise(4, 5)})
    assert b"#e8590c" in row.svg() and b"#e8590c" not in plain.svg()
    changed_YX = (np.asarray(row.pixels()).astype(int) != np.asarray(plain.pixels()).astype(int)).any(axis=2)
    across = np.flatnonzero(changed_YX.any(axis=0)) / changed_YX.shape[1]
    photo = 200 / row.width  # the photo is the left panel
    assert across.min() / photo == pytest.approx(2 / 5, abs=0.05) and across.max() / photo == pytest.approx(
        3 / 5, abs=0.05
    )
