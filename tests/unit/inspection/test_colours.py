"""Colour maps: a greater value is lighter all the way, in the lightness that eyes see (CIELAB)."""

import numpy as np
import pytest

from vitlab.core.errors import UsageError
from vitlab.inspection.colours import COLOURMAPS, coloured, table

SIGNED = "blue-red"  # the diverging one
SEQUENTIAL = [name for name in COLOURMAPS if name != SIGNED]
ROUNDING = 0.15  # of lightness, which goes to 100: what a level of 255 of one channel may take away


def lightness(table_N3: np.ndarray) -> np.ndarray:
    """L* of sRGB, as CIE defines it."""
    values = table_N3 / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    y = linear @ np.array([0.2126, 0.7152, 0.0722])
    return np.where(y > (6 / 29) ** 3, 116 * np.cbrt(y) - 16, (29 / 3) ** 3 * y)


@pytest.mark.parametrize("name", COLOURMAPS)
def test_table_is_256_colours_that_nobody_changes(name: str) -> None:
    assert table(name).shape == (256, 3) and table(name).dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        table(name)[0] = 0


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_lightness_rises_all_the_way(name: str) -> None:
    light = lightness(table(name))
    assert np.diff(light).min() > -ROUNDING
    assert np.diff(light[::8]).min() > 0.2, "no stretch of the map looks flat"
    assert light[-1] - light[0] > 60


def test_signed_map_is_lightest_at_zero_and_alike_on_both_sides() -> None:
    light = lightness(table(SIGNED))
    assert np.diff(light[:128]).min() > -ROUNDING and np.diff(light[128:]).max() < ROUNDING
    assert np.abs(light - light[::-1]).max() < 5
    assert table(SIGNED)[0, 2] > table(SIGNED)[0, 0] and table(SIGNED)[-1, 0] > table(SIGNED)[-1, 2]


def test_map_for_photos_starts_lighter_than_one_for_a_blank_page() -> None:
    assert lightness(table("ember"))[0] > 25 > 1 > lightness(table("inferno"))[0]


def test_values_have_the_colours_of_their_places() -> None:
    drawn = coloured(np.array([[-1.0, 0.0, 0.5], [1.0, 7.0, 0.25]]), "viridis")
    assert drawn.shape == (2, 3, 3)
    assert drawn[0, 0].tolist() == drawn[0, 1].tolist() == [0x44, 0x01, 0x54]
    assert drawn[1, 0].tolist() == drawn[1, 1].tolist() == [0xFD, 0xE7, 0x25]
    assert drawn[0, 2].tolist() == table("viridis")[128].tolist()


def test_unknown_map_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no colour map 'jet'\nThere are viridis"):
        table("jet")
