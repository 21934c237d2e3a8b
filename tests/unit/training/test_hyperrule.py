"""BiT-HyperRule against the step numbers of the released code."""

import pytest

from vitlab.core.errors import UsageError
from vitlab.training.hyperrule import bit_hyperrule
from vitlab.training.schedule import rate_at


@pytest.mark.parametrize(
    ("num_images", "supports"),
    [
        (1, (100, 200, 300, 400, 500)),
        (19_999, (100, 200, 300, 400, 500)),
        (20_000, (500, 3_000, 6_000, 9_000, 10_000)),
        (499_999, (500, 3_000, 6_000, 9_000, 10_000)),
        (500_000, (500, 6_000, 12_000, 18_000, 20_000)),
    ],
)
def test_length_warm_up_and_drops(num_images: int, supports: tuple[int, ...]) -> None:
    rule = bit_hyperrule(num_images, (224, 224))
    warmup, *drops, end = supports

    def rate(step: int) -> float:
        return rate_at(rule.schedule, step, base=rule.lr, total_steps=rule.steps)

    assert rule.steps == end
    assert rate(warmup // 2 - 1) == pytest.approx(0.0015)
    assert rate(warmup - 1) == rate(drops[0] - 1) == pytest.approx(0.003)
    for count, drop in enumerate(drops, 1):
        assert rate(drop) == rate((*drops, end)[count] - 1) == pytest.approx(0.003 / 10**count)
    assert rule.mixup == (0.1 if num_images >= 20_000 else 0.0)
    assert (rule.batch_size, rule.momentum, rule.weight_decay) == (512, 0.9, 0.0)


@pytest.mark.parametrize(
    ("image_size", "largest", "expected"),
    [
        ((32, 32), False, (160, 128)),
        ((32, 32), True, (160, 128)),
        ((95, 96), False, (160, 128)),
        ((96, 96), False, (448, 384)),
        ((48, 192), True, (512, 480)),
    ],
)
def test_resolution_follows_the_area(image_size: tuple[int, int], largest: bool, expected: tuple[int, int]) -> None:
    rule = bit_hyperrule(1000, image_size, largest_model=largest)
    assert (rule.resize, rule.crop) == expected


def test_nothing_is_no_data_set() -> None:
    with pytest.raises(UsageError, match="needs images"):
        bit_hyperrule(0, (32, 32))
