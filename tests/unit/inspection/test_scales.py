"""What colours stand for: units, ends and ticks."""

import numpy as np
import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.inspection.scales import Scale, measured, times_uniform


def heat_with(most: float, size: int = 10) -> torch.Tensor:
    heat_YX = torch.ones(size, size)
    heat_YX[3, 4] = most
    return heat_YX


def test_mean_patch_is_one_and_whatever_the_heat_counts_does_not_matter() -> None:
    heat_BYX = torch.rand(3, 4, 5)
    values, scale = measured(heat_BYX)
    torch.testing.assert_close(values.mean(dim=(1, 2)), torch.ones(3))
    again, same = measured(heat_BYX * torch.tensor([1.0, 70.0, 1e-3])[:, None, None])
    torch.testing.assert_close(again, values)
    assert (scale.low, scale.unit, same.low) == (1, "times the mean patch", 1)


def test_flat_map_looks_flat() -> None:
    values, scale = measured(1 + 0.02 * torch.rand(16, 16))
    assert scale.high == 2
    assert scale.place(values.numpy()).max() < 0.03


def test_one_patch_that_outshines_all_others_does_not_hide_them() -> None:
    heat_YX = heat_with(40)
    heat_YX[6, :4] = 3.0
    values, scale = measured(heat_YX)
    place = scale.place(values.numpy())
    assert place[3, 4] == 1 and place[6, 0] > 0.3 and place[0, 0] == 0


def test_values_beyond_the_end_are_marked() -> None:
    heat_YX = heat_with(40, size=20)
    heat_YX[6, :8] = 3.0
    values, scale = measured(heat_YX)
    assert scale.ticks()[-1][1].startswith("≥ ")
    assert f"strongest patch {float(values.max()):.2g}×" in scale.sentence
    whole = Scale(1, 5, "times", log=True, most=5)
    assert [text for _, text in whole.ticks()][-1] == "5" and whole.sentence == "times, log scale"


def test_on_a_small_grid_every_patch_has_its_own_colour() -> None:
    values, scale = measured(torch.arange(36.0).reshape(6, 6))
    assert scale.high == scale.most == float(values.max()) and not scale.is_cut
    values, scale = measured(torch.arange(256.0).reshape(16, 16) ** 4)
    assert scale.is_cut and scale.high == values[15, 13], "two of 256 lie beyond"


def test_relative_unit_is_per_cent_of_each_images_strongest_patch() -> None:
    values, scale = measured(torch.tensor([[[0.0, 1.0], [2.0, 4.0]], [[5.0, 0.0], [0.0, 0.0]]]), "strongest")
    assert values.flatten().tolist() == [0, 25, 50, 100, 100, 0, 0, 0]
    assert [text for _, text in scale.ticks()] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert scale.unit == "of the strongest patch"


def test_uniform_attention_is_one_in_every_head() -> None:
    values, scale = times_uniform(torch.full((3, 4, 4), 1 / 17), 17)
    torch.testing.assert_close(values, torch.ones(3, 4, 4))
    assert scale.unit == "times uniform attention (1/17)" and scale.place(values.numpy()).max() < 1e-5


@pytest.mark.parametrize("high", [2, 2.7, 3.5, 8, 23.6, 150, 4000])
@pytest.mark.parametrize("most", [2, 3, 5, 6])
def test_ticks_of_a_log_scale_are_round_rise_and_end_at_the_ends(high: float, most: int) -> None:
    ticks = Scale(1, high, "", "×", log=True).ticks(most)
    places = [place for place, _ in ticks]
    assert places == sorted(places) and places[0] == 0 and places[-1] == pytest.approx(1)
    assert 2 <= len(ticks) <= most
    for place, text in ticks[1:-1]:
        assert float(text[:-1]) == pytest.approx(high**place, rel=0.01), "the text says what lies at the place"


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [(-1, 1, ["-1", "-0.5", "0", "0.5", "1"]), (0, 1, ["0", "0.25", "0.5", "0.75", "1"])],
)
def test_ticks_of_an_even_scale(low: float, high: float, texts: list[str]) -> None:
    ticks = Scale(low, high, "").ticks()
    assert [text for _, text in ticks] == texts
    assert [place for place, _ in ticks] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_zeros_stay_zeros() -> None:
    for unit in ("mean", "strongest"):
        values, scale = measured(torch.zeros(4, 4), unit)  # type: ignore[arg-type]
        assert np.array_equal(scale.place(values.numpy()), np.zeros((4, 4)))


def test_what_is_not_a_heat_map_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[rows, columns\] of patches, not \[4\]"):
        measured(torch.ones(4))
    with pytest.raises(UsageError, match="not numbers"):
        measured(torch.tensor([[1.0, float("nan")]]))
