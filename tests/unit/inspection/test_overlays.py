"""Heat over a photo: the photo keeps its size and brightness, and a patch is coloured where it lies."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import UsageError
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess, Region, seen_region
from vitlab.inspection.colours import table
from vitlab.inspection.overlays import Look, framed_with_legend, legend, overlay, to_picture, whole_zoom
from vitlab.inspection.scales import Scale, measured


def photo(rows: int = 64, cols: int = 96, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (channels, rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def one_hot(grid: tuple[int, int], place: tuple[int, int]) -> torch.Tensor:
    heat_YX = torch.zeros(grid)
    heat_YX[place] = 1.0
    return heat_YX


def change(drawn: Image.Image, image_CYX: torch.Tensor) -> np.ndarray:
    """How far each pixel is from the image, in levels."""
    return np.abs(np.asarray(drawn).astype(int) - np.asarray(to_picture(image_CYX).convert("RGB"))).mean(axis=2)


def test_photo_keeps_its_brightness_where_no_patch_stands_out() -> None:
    image_CYX = photo()
    heat_YX = 0.2 + 0.1 * torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    heat_YX[0, 0] = 3.0
    moved = change(overlay(image_CYX, heat_YX), image_CYX)
    assert np.array_equal(moved[32:, 48:], np.zeros((32, 48))), "nothing is drawn far from the patch that stands out"
    assert moved[4:12, 4:12].mean() > 40


def test_overlay_is_as_large_as_the_photo_and_as_light_on_average() -> None:
    image_CYX = photo(123, 77)
    drawn = overlay(image_CYX, torch.rand(5, 3, generator=torch.Generator().manual_seed(2)))
    assert (drawn.size, drawn.mode) == ((77, 123), "RGB")
    assert abs(np.asarray(drawn).mean() - image_CYX.float().mean().item()) < 15


def test_strongest_patch_has_the_last_colour_and_the_photo_shows_through() -> None:
    black, white = (torch.full((1, 60, 60), level, dtype=torch.uint8) for level in (0, 255))
    heat_YX = one_hot((3, 3), (1, 1))
    on_black, on_white = (np.asarray(overlay(image, heat_YX)).astype(int)[30, 30] for image in (black, white))
    assert (on_white > on_black + 30).all(), "what stands out stays recognisable"
    strength = 1 - (on_white - on_black) / 255
    np.testing.assert_allclose(on_black / strength, table("ember")[-1], atol=4)


@pytest.mark.parametrize("level", [0.0, 0.25, 7.0])
def test_constant_heat_draws_nothing(level: float) -> None:
    image_CYX = photo()
    assert change(overlay(image_CYX, torch.full((4, 4), level)), image_CYX).max() == 0


def test_noise_around_a_constant_draws_next_to_nothing() -> None:
    image_CYX = photo()
    heat_YX = 1 + 1e-3 * torch.rand(8, 8, generator=torch.Generator().manual_seed(3))
    assert change(overlay(image_CYX, heat_YX), image_CYX).max() < 3


@pytest.mark.parametrize("resize", ["shorter-side", "squash"])
@pytest.mark.parametrize("size", [(160, 240), (240, 160), (200, 200), (97, 251)])
@pytest.mark.parametrize("crop_frac", [1.0, 0.875])
@pytest.mark.parametrize("zoom", [1, 3])
def test_marked_patch_lands_where_it_is_in_the_photo(
    resize: str, size: tuple[int, int], crop_frac: float, zoom: int
) -> None:
    """A light square in a dark photo: the patch in which the model sees it is drawn around its middle."""
    rule = Preprocess(image_size=(64, 64), resize=resize, crop_frac=crop_frac)  # type: ignore[arg-type]
    region = seen_region(rule, *size)
    middle = region.top + 0.3 * region.rows, region.left + 0.7 * region.cols
    image_CYX = torch.full((3, *size), 20, dtype=torch.uint8)
    top, left = round(middle[0]) - 5, round(middle[1]) - 5
    image_CYX[:, top : top + 10, left : left + 10] = 255
    seen_YX = read(image_CYX, rule)[0].float()
    grid_YX = seen_YX.reshape(8, 8, 8, 8).mean(dim=(1, 3))
    heat_YX = (grid_YX == grid_YX.max()).float()
    drawn = np.asarray(overlay(image_CYX, heat_YX, region=region, zoom=zoom)).astype(int)
    assert drawn.shape[:2] == (zoom * size[0], zoom * size[1])
    colour_YX = drawn[..., 0] - drawn[..., 2]  # the photo is grey, and what fades is too
    rows, cols = np.nonzero(colour_YX > colour_YX.max() / 2)
    found = (rows.mean() + 0.5) / zoom, (cols.mean() + 0.5) / zoom
    assert found[0] == pytest.approx(middle[0], abs=region.rows / 8)
    assert found[1] == pytest.approx(middle[1], abs=region.cols / 8)


def test_region_is_what_the_decoder_keeps() -> None:
    """Against the decoder itself: cut out by hand, the region is what it reads."""
    rule = Preprocess(mode="L", image_size=(32, 32), resize="shorter-side", mean=(0.5,), std=(0.5,))
    ramp = torch.arange(96, dtype=torch.uint8).expand(1, 64, 96) * 2
    region = seen_region(rule, 64, 96)
    assert region == Region(0, 16, 64, 64)
    by_hand = ramp[:, :, 16:80]
    again = read(by_hand.contiguous(), rule)
    assert (read(ramp, rule).int() - again.int()).abs()[:, :, 1:-1].max() <= 1


def test_what_was_cut_off_fades_and_has_a_line_around_the_rest() -> None:
    image_CYX = torch.full((3, 40, 80), 240, dtype=torch.uint8)
    drawn = np.asarray(overlay(image_CYX, torch.ones(4, 4), region=Region(0, 20, 40, 40)))
    assert (drawn[:, 20:60] == 240).all(), "what the model saw is as bright as it was"
    assert (drawn[:, :18] < 200).all() and (drawn[:, 62:] < 200).all()
    assert (drawn[:, 19] > 230).all() and (drawn[:, 60] > 230).all()


def test_region_outside_of_the_photo_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not lie in .*40x80"):
        overlay(photo(40, 80), torch.ones(4, 4), region=Region(0, 60, 40, 40))


def test_tiny_images_are_enlarged_with_crisp_pixels() -> None:
    image_CYX = photo(3, 4, 1)
    drawn = overlay(image_CYX, torch.zeros(3, 4), zoom=5)
    assert drawn.size == (20, 15)
    assert np.array_equal(np.asarray(drawn)[..., 0], np.asarray(to_picture(image_CYX, scale=5)))
    assert whole_zoom(12, 12) * 12 >= 320 and whole_zoom(32, 32) == 10 and whole_zoom(97, 60) == 1


def test_borders_are_drawn_on_request() -> None:
    image_CYX, heat_YX = torch.full((3, 80, 80), 90, dtype=torch.uint8), torch.ones(4, 4)
    moved = change(overlay(image_CYX, heat_YX, look=Look(grid=True)), image_CYX)
    assert np.flatnonzero(moved[5]).tolist() == [20, 40, 60] == np.flatnonzero(moved[:, 5]).tolist()


def test_patches_can_have_one_colour_each() -> None:
    black = torch.zeros(3, 40, 40, dtype=torch.uint8)
    drawn = np.array(overlay(black, one_hot((4, 4), (1, 2)), look=Look(smooth=False)))
    assert (drawn[10:20, 20:30] == drawn[15, 25]).all() and drawn[15, 25].max() > 150
    drawn[10:20, 20:30] = 0
    assert not drawn.any()


def test_scale_of_several_images_is_kept() -> None:
    image_CYX = torch.zeros(3, 40, 40, dtype=torch.uint8)
    heat_BYX = torch.ones(2, 4, 4)
    heat_BYX[0, 1, 1], heat_BYX[1, 1, 1] = 2.0, 12.0
    values_BYX, scale = measured(heat_BYX)
    weak, strong = (np.asarray(overlay(image_CYX, values_YX, scale))[15, 15].astype(int) for values_YX in values_BYX)
    assert strong.sum() > 1.5 * weak.sum() > 0


def test_large_photo_is_drawn_in_strips_alike() -> None:
    """Wider than a strip is long: rows are mixed a few at a time."""
    image_CYX = photo(7, 300_000, 1)
    heat_YX = torch.rand(7, 3, generator=torch.Generator().manual_seed(4))
    values_YX, scale = measured(heat_YX)
    drawn = np.asarray(overlay(image_CYX, values_YX, scale, look=Look(smooth=False)))
    alone = np.asarray(overlay(image_CYX[:, :, :100_000], values_YX[:, :1], scale, look=Look(smooth=False)))
    assert np.array_equal(drawn[:, :100_000], alone)


# --- legend -----------------------------------------------------------------------------------------------------------


def texts(svg: bytes) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")]


def test_legend_has_ticks_and_says_what_they_count() -> None:
    printed = texts(legend(Scale(1, 8.0, "times the mean patch", "×", log=True, most=23.0)).svg())
    assert printed[0] == "1×" and {"2×", "≥ 8×"} <= set(printed)
    assert printed[-1] == "times the mean patch, log scale; strongest patch 23×"


@pytest.mark.parametrize("width", [90, 160, 500])
def test_texts_of_a_legend_do_not_touch_and_stay_inside(width: int) -> None:
    canvas = legend(Scale(1, 37.0, "times the mean patch", "×", log=True, most=99.0), width=width)
    ticks = [node for node in ElementTree.fromstring(canvas.svg()).iter() if node.tag.endswith("text")]
    places = [float(node.get("x") or "nan") for node in ticks if node.get("y") == ticks[0].get("y")]
    assert len(places) >= 2 and min(np.diff(places)) > 10 and places[0] >= 0 and places[-1] < width


def test_picture_with_its_legend_keeps_the_picture() -> None:
    image_CYX = photo(400, 600)
    heat_YX = torch.rand(4, 6)
    alone, both = overlay(image_CYX, heat_YX), overlay(image_CYX, heat_YX, with_legend=True)
    assert both.width == 600 and 430 < both.height < 520
    assert np.array_equal(np.asarray(both)[:400], np.asarray(alone))
    assert (np.asarray(both)[-2:] == 255).all() and np.asarray(both)[400:].min() < 90, "dark letters on white"


def test_small_picture_is_enlarged_for_its_legend() -> None:
    framed = framed_with_legend(Image.new("RGB", (128, 100)), Scale(0, 100, "of the strongest patch", " %"))
    assert framed.width == 512


def test_same_numbers_draw_the_same_bytes() -> None:
    def drawn() -> bytes:
        buffer = io.BytesIO()
        heat_YX = torch.arange(24.0).reshape(4, 6)
        overlay(photo(), heat_YX, look=Look(grid=True), with_legend=True).save(buffer, "PNG")
        return buffer.getvalue() + legend(measured(heat_YX)[1]).svg()

    assert drawn() == drawn()


# --- images -----------------------------------------------------------------------------------------------------------


def test_of_channels_that_are_not_colours_the_first_is_shown() -> None:
    image_CYX = photo(4, 4, 5)
    assert np.array_equal(np.asarray(to_picture(image_CYX)), image_CYX[0].numpy())
    drawn = np.asarray(overlay(image_CYX, torch.zeros(4, 4)))
    assert np.array_equal(drawn, np.repeat(image_CYX[0].numpy()[..., None], 3, axis=-1))


def test_floats_are_refused() -> None:
    with pytest.raises(UsageError, match="needs a uint8 image"):
        overlay(torch.rand(3, 8, 8), torch.ones(2, 2))


def test_legend_of_a_tall_picture_stays_small() -> None:
    values_YX, scale = measured(torch.rand(8, 8, generator=torch.Generator().manual_seed(0)))
    picture = overlay(torch.zeros(3, 3000, 200, dtype=torch.uint8), values_YX, scale)
    width, height = framed_with_legend(picture, scale).size
    assert height - 3000 * (width // 200) < width / 3
