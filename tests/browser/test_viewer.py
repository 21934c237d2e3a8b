"""The attention viewer in a real browser: what it unpacks is what the models have, and every way to choose works.

With `VITLAB_SCREENSHOTS=FOLDER`, pages of DINOv2 and eight photos are stored there, and pictures of them.
"""

import dataclasses
import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after
from torch import Tensor

import vitlab
from vitlab.models.vit import Block, ViT
from vitlab.report import viewer
from vitlab.report.page import Report, render
from vitlab.report.viewer import Cell, PhotoAttention, ViewedModel, ViewedPhoto, Viewer, pack_attention

Open, Serious = Callable[..., Any], Callable[[Any], list[str]]
PICTURES = os.environ.get("VITLAB_SCREENSHOTS")
DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[3] / "shared" / "data")
HOSTILE = "<img src=x onerror=alert(1)> & “such”"
SIZE = (48, 64)  # taller or wider than square: rows and columns cannot be confused
PHOTOS = 3
PATIENCE_S = 20
ROOT, STAGE = "document.querySelector('.viewer')", ".v-panel:nth-child({}) .v-stage"


@dataclasses.dataclass(frozen=True)
class Made:
    """The page, and the weights behind it by model: pooled, [photos, layers, H, Q, K]."""

    path: Path
    models: list[ViewedModel]
    weights: list[Tensor]


def model_of(name: str, **options: Any) -> ViT:
    """A random model whose heads do look somewhere: at its start, attention is nearly uniform."""
    model = vitlab.create_model(name, image_size=SIZE, num_classes=5, overrides=options, seed=0).eval()
    assert isinstance(model, ViT) and model.head is not None
    with torch.no_grad():
        model.head.weight.normal_(std=0.2)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attn.qkv.weight *= 4
    return model


def looked(model: ViT, x_BCYX: Tensor, name: str, cell: Cell) -> tuple[ViewedModel, list[PhotoAttention], Tensor]:
    maps = model.attention(x_BCYX)
    prefix = maps.num_prefix
    viewed = ViewedModel(
        name, tuple(sorted(maps.layers)), len(maps.heads), tuple(maps.tokens[:prefix]), maps.grid, cell
    )
    chances = model(x_BCYX).softmax(dim=-1).detach() if model.head is not None else x_BCYX.new_zeros(len(x_BCYX), 0)
    weights = torch.stack([maps.layers[layer] for layer in viewed.layers], dim=1)
    attention = [
        PhotoAttention(
            tuple((f"{HOSTILE} {k}", float(p)) for k, p in enumerate(chances[b])),
            tuple(pack_attention(one, maps.grid, prefix, cell) for one in weights[b]),
        )
        for b in range(len(x_BCYX))
    ]
    pooled = [[viewer.pool(one, maps.grid, prefix, cell) for one in photo] for photo in weights]
    return viewed, attention, torch.stack([torch.stack(photo) for photo in pooled])


def picture(x_CYX: Tensor) -> bytes:
    pixels = ((x_CYX.clamp(-2, 2) + 2) / 4 * 255).byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model with class token and registers, and one without, of which patches are pooled and cells do not fit evenly."""
    torch.manual_seed(0)
    x_BCYX = torch.nn.functional.interpolate(torch.randn(PHOTOS, 3, 6, 8), SIZE, mode="bicubic")
    first = looked(model_of("ViT-w32d3m64h4/8", registers=2), x_BCYX, f"first {HOSTILE}", Cell(1, 1))
    second = looked(model_of("ViT-w32d5m64h2/4", pool="gap"), x_BCYX, "second", Cell(5, 3))
    photos = [
        ViewedPhoto(f"photo {k} {HOSTILE}", picture(x_BCYX[k]), (first[1][k], second[1][k]), f"{HOSTILE} 2")
        for k in range(PHOTOS)
    ]
    section = Viewer("Attention", viewer.CAPTION, [first[0], second[0]], photos)
    path = tmp_path_factory.mktemp("viewer") / "viewer.html"
    path.write_text(render(Report("title", "headline", "", [], [section], "footer")), encoding="utf-8")
    return Made(path, [first[0], second[0]], [first[2], second[2]])


@pytest.fixture
def shown(made: Made, opened: Open) -> Callable[..., Any]:
    """Opens the page, and waits until the first map is there."""

    def call(width: int = 1280, theme: str = "light") -> Any:
        page = opened(made.path, width, theme)
        until(page, f"{ROOT}.attention(0) !== null")
        return settled(page)

    return call


def settled(page: Any) -> Any:
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page


def until(page: Any, condition: str) -> None:
    """Playwright's own way to wait needs `eval`, which the page's policy forbids."""
    ending = time.monotonic() + PATIENCE_S
    while not page.evaluate(condition):
        assert time.monotonic() < ending, condition
        page.wait_for_timeout(20)


def point(page: Any, model: int, y: float, x: float) -> None:
    stage = page.locator(STAGE.format(model + 1))
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    settled(page)


def choose(page: Any, slider: str, value: int, model: int = 0) -> None:
    page.locator(f".v-panel:nth-child({model + 1}) .v-{slider}").fill(str(value))
    settled(page)


def pixels(page: Any, canvas: str, model: int = 0) -> str:
    return page.locator(f".v-panel:nth-child({model + 1}) {canvas} canvas").evaluate("canvas => canvas.toDataURL()")


def said(page: Any, model: int = 0) -> str:
    return page.locator(".v-said").nth(model).text_content()


def panel(page: Any, name: str, model: int = 0) -> str:
    return page.locator(".v-panel").nth(model).get_attribute(f"data-{name}")


def press(page: Any, *keys: str) -> Any:
    page.locator(STAGE.format(1)).focus()
    for key in keys:
        page.keyboard.press(key)
    return settled(page)


def query_of(made: Made, model: int, y: float, x: float) -> int:
    """The query among the model's tokens, worked out from the patch under the place."""
    (rows, cols), cell = made.models[model].grid, made.models[model].cell.query
    row, col = int(y * rows) // cell, int(x * cols) // cell
    return len(made.models[model].prefix) + row * made.models[model].queries[1] + col


def is_what_the_model_has(page: Any, made: Made, model: int, photo: int, layer: int, head: int, query: int) -> bool:
    """Whether the browser's numbers are the model's, within what the page promises; head 0 is the mean."""
    weights_HQK = made.weights[model][photo, layer].double()
    truth = (weights_HQK.mean(dim=0) if head == 0 else weights_HQK[head - 1])[query].numpy()
    got = page.evaluate(f"{ROOT}.attention({model})")
    assert (got["layer"], got["head"]) == (made.models[model].layers[layer], head)
    assert np.array(got["patches"]).shape == made.models[model].keys
    values = np.concatenate([got["prefix"], np.ravel(got["patches"])])
    return bool((np.abs(values - truth) <= allowed_error(truth)).all())


def allowed_error(truth: Any) -> Any:
    return viewer.ERROR * (truth + viewer.OFFSET / truth.shape[-1]) * (1 + 1e-4)


COLLECT = """async ([photo, model, layers, heads, rows, cols]) => {
  const root = document.querySelector('.viewer'), panel = root.querySelectorAll('.v-panel')[model];
  const stage = panel.querySelector('.v-stage'), box = stage.getBoundingClientRect(), found = [];
  const slide = (name, value) => {
    const input = panel.querySelector(name);
    input.value = value;
    input.dispatchEvent(new Event('input'));
  };
  root.querySelectorAll('.v-thumb')[photo].click();
  for (let layer = 0; layer < layers; layer++) {
    slide('.v-layer', layer + 1);
    for (let head = 0; head <= heads; head++) {
      slide('.v-head', head);
      for (let row = 0; row < rows; row++) for (let col = 0; col < cols; col++) {
        const at = { clientX: box.left + (col + 0.5) / cols * box.width, clientY: box.top + (row + 0.5) / rows * box.height };
        stage.dispatchEvent(new PointerEvent('pointermove', { pointerType: 'mouse', ...at }));
        while (!root.attention(model)) await new Promise(done => setTimeout(done, 10));
        const { prefix, patches } = root.attention(model);
        found.push([...prefix, ...patches.flat()]);
      }
    }
  }
  return found;
}"""


@pytest.mark.parametrize("model", slow_after(1, [1, 0]))
def test_all_numbers_are_those_of_the_models(made: Made, shown: Callable[..., Any], model: int) -> None:
    """From every patch, in every head of every layer, for every photo."""
    page = shown()
    viewed, weights = made.models[model], made.weights[model].double()
    rows, cols = viewed.grid
    cells = (
        torch.arange(rows)[:, None] // viewed.cell.query * viewed.queries[1] + torch.arange(cols) // viewed.cell.query
    )
    queries = len(viewed.prefix) + cells.flatten()
    for photo in range(PHOTOS):
        found = page.evaluate(COLLECT, [photo, model, len(viewed.layers), viewed.heads, rows, cols])
        heads = torch.cat([weights[photo].mean(dim=1, keepdim=True), weights[photo]], dim=1)
        truth = heads[:, :, queries].flatten(0, 2).numpy()
        assert np.array(found).shape == truth.shape
        assert (np.abs(np.array(found) - truth) <= allowed_error(truth)).all()


def test_numbers_of_prefix_tokens_are_those_of_the_model(made: Made, shown: Callable[..., Any]) -> None:
    page = shown()
    for k, name in enumerate(("class token", "register 0", "register 1")):
        page.locator(".v-tokens").first.get_by_role("button", name=name).click()
        settled(page)
        assert is_what_the_model_has(page, made, 0, 0, 2, 0, k)
        assert f"the {name} gives" in said(page)


def test_pointer_changes_the_maps_and_the_text(made: Made, shown: Callable[..., Any]) -> None:
    page = shown()
    seen = set[tuple[str, ...]]()
    for y, x in ((0.1, 0.1), (0.1, 0.9), (0.9, 0.1)):
        point(page, 0, y, x)
        seen.add(
            (*(pixels(page, canvas, model) for canvas in (".v-stage", ".v-sheet") for model in (0, 1)), said(page))
        )
        row, col = int(y * 6), int(x * 8)
        assert f"patch ({row}, {col}) gives" in said(page)
    assert all(len(set(kind)) == 3 for kind in zip(*seen, strict=True)), "both photos, both sheets, and the sentence"
    assert re.search(r"patches \(10–11, 0–4\) give ", said(page, 1)), "the last cells are cut at the edge"


def test_sentence_names_the_strongest_patch(made: Made, shown: Callable[..., Any]) -> None:
    page = shown()
    choose(page, "head", 2)
    point(page, 0, 0.55, 0.55)
    row_K = made.weights[0][0, 2, 1, query_of(made, 0, 0.55, 0.55), 3:]
    row, col = (int(value) for value in (panel(page, "most") or "").split())
    assert float(row_K[row * 8 + col]) >= float(row_K.max()) / 1.11, (
        "or one that has as much, as exactly as it is stored"
    )
    assert f"to patch ({row}, {col}), the most of all patches" in said(page)
    assert said(page).startswith("Layer 3, head 2: patch (3, 4) gives ")
    until(page, "document.querySelector('.v-live').textContent.startsWith('Layer 3, head 2: patch (3, 4)')")


def test_click_pins_the_patch_and_escape_lets_it_go(made: Made, shown: Callable[..., Any]) -> None:
    page = shown()
    stage = page.locator(STAGE.format(1))
    box = stage.bounding_box()
    stage.click(position={"x": 0.55 * box["width"], "y": 0.55 * box["height"]})
    point(page, 0, 0.1, 0.9)
    assert "patch (3, 4) gives" in said(page), "pinned"
    here = page.locator(".v-here").first.text_content()
    share = made.weights[0][0, 2].mean(dim=0)[query_of(made, 0, 0.55, 0.55), 3 + 7]
    number = float(re.match(r"Here, patch \(0, 7\) gets (?:under )?([\d.]+) %", here)[1])  # pyright: ignore[reportOptionalSubscript]
    assert abs(number / 100 - share) <= 0.1 * (share + 0.1), "rounded to two digits"
    page.keyboard.press("Escape")
    point(page, 0, 0.9, 0.9)
    assert "patch (5, 7) gives" in said(page)
    stage.click(position={"x": 0.55 * box["width"], "y": 0.55 * box["height"]})
    stage.click(position={"x": 0.55 * box["width"], "y": 0.55 * box["height"]})
    point(page, 0, 0.1, 0.1)
    assert "patch (0, 0) gives" in said(page), "a second click lets go, too"


def test_sliders_and_small_maps_choose_layer_and_head(shown: Callable[..., Any]) -> None:
    page = shown()
    page.emulate_media(reduced_motion="reduce")  # the frame is where it belongs at once
    point(page, 0, 0.55, 0.55)
    seen = {pixels(page, ".v-stage")}
    choose(page, "layer", 1)
    seen.add(pixels(page, ".v-stage"))
    choose(page, "head", 3)
    seen.add(pixels(page, ".v-stage"))
    assert len(seen) == 3
    assert (panel(page, "layer"), panel(page, "head")) == ("0", "3")
    sheet = page.locator(".v-sheet").first
    box = sheet.bounding_box()
    sheet.click(position={"x": 0.9 * box["width"], "y": 0.5 * box["height"]})
    settled(page)
    assert (panel(page, "layer"), panel(page, "head")) == ("1", "4")
    assert page.locator(".v-layer").first.input_value() == "2"
    frame, after = page.locator(".v-frame").first.bounding_box(), sheet.bounding_box()
    assert frame["x"] <= after["x"] + 0.9 * box["width"] <= frame["x"] + frame["width"]
    sheet.click(position={"x": 5, "y": 5})
    settled(page)
    assert (panel(page, "layer"), panel(page, "head")) == ("0", "mean")


def test_two_models_go_by_relative_depth_until_they_are_let_go(shown: Callable[..., Any]) -> None:
    page = shown()
    choose(page, "layer", 2)
    assert page.locator(".v-layer").nth(1).input_value() == "3", "the middle of 3 and of 5 layers"
    choose(page, "layer", 1, model=1)
    assert page.locator(".v-layer").first.input_value() == "1"
    page.locator("[data-option=link]").uncheck()
    choose(page, "layer", 3)
    assert page.locator(".v-layer").nth(1).input_value() == "1"


def test_models_are_shown_together_or_alone(shown: Callable[..., Any]) -> None:
    page = shown()
    panels = page.locator(".v-panel")
    assert [panels.nth(k).is_visible() for k in (0, 1)] == [True, True]
    left, right = (panels.nth(k).bounding_box() for k in (0, 1))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"], "side by side"
    page.get_by_role("button", name="second", exact=True).click()
    assert [panels.nth(k).is_visible() for k in (0, 1)] == [False, True]
    until(page, f"{ROOT}.dataset.shown === '1'")
    press_on = page.locator(STAGE.format(2))
    press_on.focus()
    page.keyboard.press("ArrowRight")
    until(page, f"{ROOT}.attention(1) !== null")
    assert "patches (5–9, 10–14) give " in said(settled(page), 1), "from the class token to the middle"
    page.get_by_role("button", name="Both").click()
    assert [panels.nth(k).is_visible() for k in (0, 1)] == [True, True]


def test_model_without_class_token_is_reported(shown: Callable[..., Any]) -> None:
    page = shown()
    assert "the class token gives" in said(page)
    assert said(page, 1) == "second has no class token."
    assert page.locator(".v-status").nth(1).is_visible()


def test_keys(made: Made, shown: Callable[..., Any]) -> None:
    page = shown()
    press(page, "ArrowDown")
    assert "patch (3, 4) gives" in said(page), "from the class token to the middle"
    press(page, "ArrowUp", "ArrowUp", "ArrowLeft")
    assert "patch (1, 3) gives" in said(page)
    press(page, *["ArrowUp"] * 4, *["ArrowRight"] * 9)
    assert "patch (0, 7) gives" in said(page), "the edge is the end"
    assert is_what_the_model_has(page, made, 0, 0, 2, 0, 3 + 7)
    press(page, "[", ".", ".", ".", ",")
    assert (panel(page, "layer"), panel(page, "head")) == ("1", "2")
    press(page, "]", "]", "]")
    assert panel(page, "layer") == "2"
    press(page, "c")
    assert "the class token gives" in said(page)
    without = pixels(page, ".v-stage")
    press(page, "g")
    assert pixels(page, ".v-stage") != without and page.locator("[data-option=grid]").is_checked()
    press(page, "g")
    assert pixels(page, ".v-stage") == without
    press(page, "3")
    until(page, f"{ROOT}.attention(0) !== null")
    assert page.locator(".v-thumb").nth(2).get_attribute("aria-pressed") == "true"
    assert is_what_the_model_has(page, made, 0, 2, 2, 2, 0)
    press(page, "9")
    assert page.locator(".v-thumb").nth(2).get_attribute("aria-pressed") == "true", "there are three"


def test_keys_outside_the_viewer_are_the_readers_own(shown: Callable[..., Any]) -> None:
    page = shown()
    page.locator("#theme").focus()
    page.mouse.move(1, 1)
    before = said(page)
    page.keyboard.press("[")
    assert said(settled(page)) == before
    page.locator(".v-head").first.focus()
    page.keyboard.press("ArrowRight")
    assert panel(settled(page), "head") == "1" and said(page).endswith(before.partition(":")[2][-1]), (
        "slider, not patch"
    )
    assert "the class token gives" in said(page)


def test_options_change_the_drawing_and_the_legend(shown: Callable[..., Any]) -> None:
    page = shown()
    point(page, 0, 0.55, 0.55)
    seen = {pixels(page, ".v-stage")}
    legend = page.locator(".v-ticks").first.text_content()
    assert legend.startswith("equal share 2 %"), "of 51 tokens"
    for name in ("smooth", "grey", "fit"):
        page.locator(f"[data-option={name}]").click()
        settled(page)
        seen.add(pixels(page, ".v-stage"))
    assert len(seen) == 4
    end = page.locator(".v-ticks span:last-child").first.text_content()
    strongest = float(panel(page, "share"))
    assert abs(float(end.rstrip(" %")) / 100 - strongest) < 0.06 * strongest


def test_prediction_has_bars_as_long_as_its_probabilities(shown: Callable[..., Any]) -> None:
    page = shown()
    rows = page.locator(".v-answers").first.locator("li")
    assert rows.count() == 5
    assert rows.nth(0).locator(".name").text_content() == f"{HOSTILE} 0"
    assert page.locator(".v-answers h4").first.text_content() == f"Prediction (true: {HOSTILE} 2)"
    assert [rows.nth(k).get_attribute("class") == "right" for k in range(5)] == [False, False, True, False, False]
    widths = [rows.nth(k).locator(".bar").evaluate("bar => parseFloat(bar.style.width)") for k in range(5)]
    assert abs(sum(widths) - 100) < 1e-3


def test_tap_chooses_a_patch_on_a_phone(made: Made, shown: Callable[..., Any]) -> None:
    page = shown(390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert [page.locator(".v-panel").nth(k).is_visible() for k in (0, 1)] == [True, False], "one at a time"
    stage = page.locator(STAGE.format(1))
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    assert box["width"] > 300
    before = pixels(page, ".v-stage")
    for y, x in ((0.25, 0.75), (0.75, 0.25)):
        stage.tap(position={"x": x * box["width"], "y": y * box["height"]})
        settled(page)
        assert f"patch ({int(6 * y)}, {int(8 * x)}) gives" in said(page)
        assert is_what_the_model_has(page, made, 0, 0, 2, 0, query_of(made, 0, y, x))
    assert pixels(page, ".v-stage") != before
    page.get_by_role("button", name="second", exact=True).tap()
    until(page, f"{ROOT}.attention(1) !== null")
    assert is_what_the_model_has(page, made, 1, 0, 4, 0, query_of(made, 1, 0.75, 0.25)), "the same place"
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_play_goes_through_the_layers(shown: Callable[..., Any]) -> None:
    page = shown()
    page.get_by_role("button", name="Play through the layers").first.click()
    assert page.locator(".v-layer").first.input_value() in ("1", "3")
    until(page, "document.querySelector('.v-layer').value === '2'")
    until(page, "document.querySelector('.v-layer').value === '3'")
    page.get_by_role("button", name="Play through the layers").first.wait_for()


def test_who_wants_little_motion_is_not_offered_any(shown: Callable[..., Any]) -> None:
    page = shown()
    page.emulate_media(reduced_motion="reduce")
    assert not page.locator(".v-play").first.is_visible()
    assert page.locator(".v-frame").first.evaluate("frame => getComputedStyle(frame).transitionDuration") in ("0s", "")


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_broken_data_give_a_sentence_and_the_rest_works(made: Made, opened: Open, damage: str, tmp_path: Path) -> None:
    text = made.path.read_text("utf-8")
    found = re.search(r'data-key="0 0 2">([^<]+)<', text)
    assert found is not None
    start, end = found.span(1)
    middle = (start + end) // 2
    middle -= (middle - start) % 4
    replaced = text[:middle] + text[end:] if damage == "truncated" else f"{text[:middle]}AAAAAAAA{text[middle + 8 :]}"
    (tmp_path / "broken.html").write_text(replaced, encoding="utf-8")
    page = opened(tmp_path / "broken.html")
    until(page, "document.querySelector('.v-status').textContent.includes('cannot be unpacked')")
    assert page.locator(".v-status").first.is_visible()
    assert said(page).startswith("The attention of layer 3 cannot be unpacked")
    choose(page, "layer", 2)
    until(page, f"{ROOT}.attention(0) !== null")
    assert is_what_the_model_has(page, made, 0, 0, 1, 0, 0)


@pytest.mark.parametrize("width", slow_after(1, [390, 1280]))
def test_everyone_can_use_it(shown: Callable[..., Any], serious: Serious, width: int) -> None:
    page = shown(width)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert not serious(page), theme
    assert page.evaluate("document.documentElement.scrollWidth") == width


def photos_of(name: str, ids: list[int]) -> list[tuple[str, Image.Image]]:
    archive = np.load(DATA / name)
    data, offsets = archive["data"].tobytes(), archive["offsets"]
    return [
        (str(archive["names"][i]), Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])).convert("RGB"))
        for i in ids
    ]


@pytest.mark.skipif(not PICTURES, reason="pictures for the documentation are made with VITLAB_SCREENSHOTS")
@pytest.mark.slow
@pytest.mark.parametrize("models", [1, 2])
def test_pictures_of_dinov2(opened: Open, models: int) -> None:
    """A trained model, alone and beside one of random weights: to be looked at, and small enough to be sent."""
    trained = vitlab.load(str(DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"), quiet=True)
    photos = [*photos_of("hymenoptera/hymenoptera_val.npz", [3, 20, 90, 120])]
    photos += photos_of("oxford_pets/pets_test.npz", [5, 400, 1300, 2600])
    x_BCYX = trained.pixels([photo for _, photo in photos])
    random = vitlab.create_model(trained.model.spec, seed=0).eval()
    views = [
        looked(model, x_BCYX, name, Cell(1, 1))
        for model, name in ((trained.model, "DINOv2 ViT-S/14"), (random, "random weights"))
        if isinstance(model, ViT)
    ][:models]
    shown = [
        ViewedPhoto(name, picture(x_BCYX[k]), tuple(view[1][k] for view in views)) for k, (name, _) in enumerate(photos)
    ]
    section = Viewer("Attention, head by head", viewer.CAPTION, [view[0] for view in views], shown)
    path = Path(str(PICTURES)) / f"viewer-{models}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(Report("DINOv2", "Where it looks", "", [], [section], "footer")), encoding="utf-8")
    assert path.stat().st_size < 15e6 * models
    for width, theme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page = opened(path, width, theme)
        until(page, f"{ROOT}.attention(0) !== null")
        page.locator(".v-thumb").nth(3).click()
        press(page, "ArrowUp", "ArrowUp", "ArrowUp", "ArrowRight")
        page.wait_for_timeout(1500)  # until the other layers are there, too
        page.locator(".viewer").screenshot(path=path.with_name(f"viewer-{models}-{width}-{theme}.png"))


def test_each_model_is_drawn_over_what_it_saw(opened: Open, tmp_path: Path) -> None:
    red, blue = (torch.full((3, *size), -2.0) for size in (SIZE, (48, 48)))
    red[0], blue[2] = 2.0, 2.0
    x_BCYX = torch.randn(1, 3, *SIZE)
    views = [looked(model_of("ViT-w32d3m64h4/8"), x_BCYX, name, Cell(1, 1)) for name in ("first", "second")]
    photo = ViewedPhoto("photo", picture(red), tuple(view[1][0] for view in views), second=picture(blue))
    section = Viewer("Attention", viewer.CAPTION, [view[0] for view in views], [photo])
    path = tmp_path / "viewer.html"
    path.write_text(render(Report("title", "headline", "", [], [section], "footer")), encoding="utf-8")
    page = opened(path, 1280, "light")
    until(page, f"{ROOT}.attention(1) !== null")
    settled(page)
    corner = "canvas => [...canvas.getContext('2d').getImageData(canvas.width >> 1, 2, 1, 1).data]"
    ratio = "canvas => Math.round(100 * canvas.width / canvas.height)"
    drawn = [page.locator(STAGE.format(model) + " canvas") for model in (1, 2)]
    assert [each.evaluate(ratio) for each in drawn] == [133, 100]
    first, second = (each.evaluate(corner) for each in drawn)
    assert first[0] > first[2] and second[2] > second[0]
