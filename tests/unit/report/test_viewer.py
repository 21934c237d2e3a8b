"""The viewer's data: within the stated error of the weights, small enough for a page, and names from data stay text."""

import base64
import dataclasses
import hashlib
import io
import json
import math
import os
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitlab
from vitlab.models.spec import Pair
from vitlab.report import viewer
from vitlab.report.page import Report, Section, plots, render
from vitlab.report.viewer import (
    Cell,
    PhotoAttention,
    ViewedModel,
    ViewedPhoto,
    Viewer,
    cell_size,
    pack_attention,
)

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[4] / "shared" / "data")
DINO, BEES = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors", DATA / "hymenoptera" / "hymenoptera_val.npz"
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"


def random_weights(heads: int, grid: Pair, prefix: int, sharp: float = 4.0) -> Tensor:
    tokens = prefix + math.prod(grid)
    logits = torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(0))
    return (sharp * logits).softmax(dim=-1)


def unpack(packed: bytes, heads: int, queries: Pair, keys: Pair, prefix: int) -> np.ndarray[Any, Any]:
    """What the script does, step by step: shares [H, Q, K]."""
    data = zlib.decompress(packed)
    counts = np.frombuffer(data, "<u4", viewer.EXPECTATIONS)
    symbols = np.frombuffer(data, np.uint8, offset=counts.nbytes)
    following = np.cumsum(counts) - counts
    patches = np.zeros((heads, *queries, *keys), int)
    for h, r, c, y, x in np.ndindex(patches.shape):
        expected = (patches[h, r - 1, c, y, x] if r else 0) + (patches[h, r, c - 1, y, x] if c else 0)
        expected = viewer.QUERY_WEIGHT * expected
        expected += (patches[h, r, c, y - 1, x] if y else 0) + (patches[h, r, c, y, x - 1] if x else 0)
        segment = min(expected, viewer.EXPECTATIONS - 1)
        patches[h, r, c, y, x] = symbols[following[segment]]
        following[segment] += 1
    assert (following == np.cumsum(counts)).all(), "every segment is used up"
    Q, K = math.prod(queries), math.prod(keys)
    rest = symbols[int(counts.sum()) :]
    assert len(rest) == heads * prefix * (Q + prefix + K)
    levels = np.zeros((heads, prefix + Q, prefix + K), int)
    levels[:, prefix:, prefix:] = patches.reshape(heads, Q, K)
    levels[:, prefix:, :prefix] = rest[: heads * Q * prefix].reshape(heads, Q, prefix)
    levels[:, :prefix] = rest[heads * Q * prefix :].reshape(heads, prefix, prefix + K)
    return to_shares(levels, prefix + K)


def to_shares(levels: np.ndarray[Any, Any], keys: int) -> np.ndarray[Any, Any]:
    """The shares that levels stand for, with `keys` tokens in a row; the script does the same."""
    shares = (np.exp(levels * viewer.STEP) / math.cosh(viewer.STEP / 2) - 1) * (viewer.OFFSET / keys)
    return np.clip(shares, 0, 1)


def within_bound(shares: np.ndarray[Any, Any], weights: Tensor) -> bool:
    truth = weights.double().numpy()
    allowed = viewer.ERROR * (truth + viewer.OFFSET / truth.shape[-1])
    return bool((np.abs(shares - truth) <= allowed * (1 + 1e-6)).all())


@pytest.mark.parametrize("sharp", [0.0, 1.0, 4.0, 100.0])
@pytest.mark.parametrize(("grid", "prefix"), [((4, 4), 1), ((3, 5), 0), ((2, 3), 5), ((1, 7), 1)])
def test_packed_weights_are_within_the_stated_error(grid: Pair, prefix: int, sharp: float) -> None:
    weights = random_weights(2, grid, prefix, sharp)
    assert within_bound(unpack(pack_attention(weights, grid, prefix), 2, grid, grid, prefix), weights)


def test_error_is_bounded_for_every_weight_and_nearly_reached() -> None:
    weights = torch.linspace(0, 1, 1_000_001, dtype=torch.float64).reshape(1, 1, -1)
    for keys in (5, 257, 4000):
        rows = weights.expand(1, 1, -1).numpy()
        levels = np.rint(np.log1p(rows * keys / viewer.OFFSET) / viewer.STEP)
        error = np.abs(to_shares(levels, keys) - rows) / (rows + viewer.OFFSET / keys)
        assert 0.9 * viewer.ERROR < error.max() <= viewer.ERROR * (1 + 1e-9)
        assert levels.max() < 256


@pytest.mark.parametrize("cell", [Cell(2, 1), Cell(2, 2), Cell(3, 2), Cell(7, 7)])
def test_cells_average_queries_and_sum_keys_also_at_the_edge(cell: Cell) -> None:
    grid, prefix = (5, 6), 2
    weights = random_weights(2, grid, prefix).double()
    pooled = viewer.pool(weights, grid, prefix, cell)
    queries, keys = ((-(-5 // side), -(-6 // side)) for side in cell)
    assert pooled.shape == (2, prefix + math.prod(queries), prefix + math.prod(keys))
    assert torch.allclose(pooled.sum(-1), torch.ones(1).double()), "rows still sum to 1"
    patches = weights[:, prefix:, prefix:].reshape(2, *grid, *grid)
    for r, c, y, x in np.ndindex(*queries, *keys):
        q, k = cell
        block = patches[:, r * q : (r + 1) * q, c * q : (c + 1) * q, y * k : (y + 1) * k, x * k : (x + 1) * k]
        expected = block.sum(dim=(3, 4)).mean(dim=(1, 2))
        got = pooled[:, prefix + r * queries[1] + c, prefix + y * keys[1] + x]
        assert torch.allclose(got, expected)
    assert torch.allclose(pooled[:, :prefix, :prefix], weights[:, :prefix, :prefix])
    assert within_bound(unpack(pack_attention(weights, grid, prefix, cell), 2, queries, keys, prefix), pooled)


SIZES = {
    "ViT-S/14 at 224": (12, 6, (16, 16), Cell(1, 1)),
    "ViT-B/16 at 224": (12, 12, (14, 14), Cell(1, 1)),
    "ViT-L/16 at 224": (24, 16, (14, 14), Cell(2, 1)),
    "ViT-B/16 at 384": (12, 12, (24, 24), Cell(3, 1)),
    "ViT-S/14 at 518": (12, 6, (37, 37), Cell(3, 2)),
}


@pytest.mark.parametrize("name", SIZES)
def test_cells_are_as_small_as_a_page_of_eight_photos_allows(name: str) -> None:
    layers, heads, grid, expected = SIZES[name]
    model = ViewedModel(name, tuple(range(layers)), heads, ("cls",), grid)
    assert cell_size(model, 8) == expected
    assert math.prod(cell_size(model, 8, models=2)) >= math.prod(expected)
    stored = dataclasses.replace(model, cell=expected)
    values = 8 * layers * heads * (1 + math.prod(stored.queries)) * (1 + math.prod(stored.keys))
    assert values <= 46e6


def test_hopelessly_many_tokens_become_few_cells() -> None:
    model = ViewedModel("m", tuple(range(48)), 64, (), (256, 256))
    cell = cell_size(model, 1000)
    assert max(dataclasses.replace(model, cell=cell).keys) < 16


def test_equal_share_is_that_of_a_cell() -> None:
    model = ViewedModel("m", (0,), 1, ("cls",), (4, 4), Cell(2, 2))
    assert (model.queries, model.keys) == ((2, 2), (2, 2))
    assert model.equal_share == 4 / 17
    assert model.stored_share == 1 / 5


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def section(word: str = "plain", models: int = 1) -> Viewer:
    grid = (3, 3)
    viewed = [ViewedModel(f"model {word}{k}", (0, 5), 2, ("cls",), grid) for k in range(models)]
    layers = (pack_attention(random_weights(2, grid, 1), grid, 1),) * 2
    attention = (PhotoAttention(((f"class {word}", 0.75),), layers),) * models
    photos = [ViewedPhoto(f"photo {word}", picture(), attention, f"label {word}")] * 2
    return Viewer(f"viewer {word}", f"caption {word}", viewed, photos)


class Page(HTMLParser):
    """Tags with their attributes, and the text between them, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page(*sections: Section) -> str:
    return render(Report("title", "headline", "", [], sections, "footer"))


def test_hostile_names_are_shown_as_text_and_add_no_tag() -> None:
    plain, evil = Page(page(section(models=2))), Page(page(section(EVIL, 2)))
    assert [(tag, sorted(attributes)) for tag, attributes in evil.tags] == [
        (tag, sorted(attributes)) for tag, attributes in plain.tags
    ]
    assert f"viewer {EVIL}" in evil.texts and f"model {EVIL}0" in evil.texts
    assert f"photo {EVIL}" in [attributes.get("alt") for tag, attributes in evil.tags if tag == "img"]
    (settings,) = (json.loads(a["data-settings"] or "") for _, a in evil.tags if "data-settings" in a)
    assert settings["photos"][0]["label"] == f"label {EVIL}"
    assert settings["photos"][0]["predictions"] == [[[f"class {EVIL}", 0.75]]] * 2


def test_layers_are_in_the_page_to_the_byte() -> None:
    shown = section(models=2)
    text = page(shown)
    for key, data in shown.packed():
        assert f'data-key="{key}">{data}</script>' in text
    assert [key for key, _ in shown.packed()] == [
        "0 0 0",
        "0 0 1",
        "0 1 0",
        "0 1 1",
        "1 0 0",
        "1 0 1",
        "1 1 0",
        "1 1 1",
    ]
    assert base64.b64decode(next(shown.packed())[1]) == shown.photos[0].attention[0].layers[0]


def test_script_and_style_are_only_in_pages_that_have_a_viewer() -> None:
    without, with_viewer = page(), page(section())
    assert "v-stage" not in without and ".v-stage {" in with_viewer
    for text, count in ((without, 1), (with_viewer, 2)):
        policy = next(a["content"] for _, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        (allowed,) = (rule.split()[1:] for rule in policy.split("; ") if rule.startswith("script-src"))
        scripts = [part.split("</script>")[0] for part in text.split("<script>")[1:]]
        digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        assert allowed == [f"'sha256-{digest}'" for digest in digests]
        assert len(allowed) == count


def test_page_says_how_exact_it_is_and_what_was_pooled() -> None:
    shown = section()
    assert shown.remarks == ["Shares are exact to 5 % of themselves plus 1.5 percentage points."]
    assert shown.remarks[0] in page(shown)
    coarse = dataclasses.replace(shown.models[0], grid=(6, 6), cell=Cell(4, 2))
    (printed,) = dataclasses.replace(shown, models=[coarse]).remarks
    assert "queries are taken together in cells of 4x4 patches (averaged), keys in cells of 2x2 (summed)." in printed
    (printed,) = dataclasses.replace(shown, models=[dataclasses.replace(coarse, cell=Cell(2, 1))]).remarks
    assert printed.endswith("in cells of 2x2 patches (averaged), keys are single patches.")
    two = dataclasses.replace(section(models=2), models=[shown.models[0], coarse])
    assert [remark.partition(":")[0] for remark in two.remarks] == ["model plain0", "model plain0"]


def test_viewer_is_not_a_file_of_its_own() -> None:
    assert plots(Report("title", "headline", "", [], [section()], "footer")) == {}


@pytest.mark.skipif(os.environ.get("VITLAB_SOAK") != "1", reason="a large model on photos: VITLAB_SOAK=1")
@pytest.mark.skipif(not (DINO.exists() and BEES.exists()), reason=f"needs {DINO} and {BEES}")
def test_eight_photos_of_a_small_vit_stay_well_below_15_megabytes() -> None:
    classifier = vitlab.load(str(DINO), quiet=True)
    archive = np.load(BEES)
    data, offsets = archive["data"].tobytes(), archive["offsets"]
    photos = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]])).convert("RGB") for i in range(0, 16, 2)]
    size = 0
    for photo in photos:
        maps = classifier.model.attention(classifier.pixels([photo]))
        for weights_BHTT in maps.layers.values():
            size += len(base64.b64encode(pack_attention(weights_BHTT[0], maps.grid, maps.num_prefix)))
    assert len(maps.tokens) == 257 and len(maps.layers) == 12
    assert size < 11.5e6
