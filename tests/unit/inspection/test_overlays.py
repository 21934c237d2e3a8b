"""Heat over an image: the photo keeps its brightness where there is none, and the hottest place has the warmest colour."""

import numpy as np
import torch

from vitlab.inspection.overlays import overlay, to_picture


def heat_at(size: int, place: tuple[int, int], most: float = 1.0) -> torch.Tensor:
    heat_YX = torch.full((size, size), 0.01)
    heat_YX[place] = most
    return heat_YX


def test_image_is_untouched_where_the_least_is_looked_at() -> None:
    image_CYX = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    heat_YX = torch.linspace(0.1, 1, 64).reshape(8, 8)  # the more, the lower
    drawn, plain = np.asarray(overlay(image_CYX, heat_YX)), np.asarray(to_picture(image_CYX))
    assert np.array_equal(drawn[:4], plain[:4])
    assert not np.array_equal(drawn[7], plain[7])


def test_hottest_place_is_the_warmest_and_the_image_shows_through() -> None:
    black, white = torch.zeros(1, 8, 8, dtype=torch.uint8), torch.full((1, 8, 8), 255, dtype=torch.uint8)
    heat_YX = heat_at(8, (0, 0))
    heat_YX[4, 4] = 0.1
    on_black, on_white = (np.asarray(overlay(image, heat_YX)).astype(int) for image in (black, white))
    red, _, blue = on_black[0, 0]
    assert red > 2 * blue and on_black[4, 4][2] > on_black[4, 4][1]
    assert (on_white[0, 0] > on_black[0, 0]).all(), "what is looked at stays recognisable"


def test_one_patch_that_outshines_all_others_does_not_hide_them() -> None:
    heat_YX = heat_at(8, (0, 0), most=1.0)
    heat_YX[4, 4] = 0.1  # ten times the rest, and a tenth of the greatest
    drawn = np.asarray(overlay(torch.zeros(1, 8, 8, dtype=torch.uint8), heat_YX)).astype(int)
    assert drawn[4, 4].sum() > 0.25 * drawn[0, 0].sum()


def test_flat_and_empty_heat_draw_nothing() -> None:
    image_CYX = torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8)
    for heat in (torch.zeros(4, 4), torch.full((4, 4), 0.25)):
        assert np.array_equal(np.asarray(overlay(image_CYX, heat)), np.asarray(to_picture(image_CYX)))


def test_enlarged_overlay_keeps_crisp_pixels() -> None:
    image_CYX = torch.randint(0, 256, (1, 3, 4), dtype=torch.uint8)
    drawn = overlay(image_CYX, torch.zeros(3, 4), scale=5)
    assert drawn.size == (20, 15)
    assert np.array_equal(np.asarray(drawn)[..., 0], np.asarray(to_picture(image_CYX, scale=5)))


def test_of_channels_that_are_no_colours_the_first_is_shown() -> None:
    image_CYX = torch.randint(0, 256, (5, 4, 4), dtype=torch.uint8)
    assert np.array_equal(np.asarray(to_picture(image_CYX)), image_CYX[0].numpy())
    drawn = np.asarray(overlay(image_CYX, torch.zeros(4, 4)))
    assert np.array_equal(drawn, np.repeat(image_CYX[0].numpy()[..., None], 3, axis=-1))
