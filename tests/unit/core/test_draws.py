"""Numbers by key: the same everywhere, unrelated to their neighbours, and distributed as they say."""

import pytest
import torch

from vitlab.core import draws
from vitlab.core.runtime import mix

MANY = torch.arange(100_000)


@pytest.mark.parametrize("keys", [(0,), (1, 2, 3), (2**63 - 1, 5), (7, -1), (2**64 - 1,)])
def test_keyed_is_the_vectorised_form_of_mix(keys: tuple[int, ...]) -> None:
    assert (int(draws.keyed(*keys)) % 2**64) >> 1 == mix(*keys)


def test_keys_are_broadcast_and_order_does_not_matter() -> None:
    whole = draws.uniform(3, torch.arange(4)[:, None], torch.arange(5), count=2)
    assert whole.shape == (4, 5, 2)
    one = draws.uniform(3, 2, torch.tensor([4, 1]), count=2)
    assert torch.equal(whole[2, [4, 1]], one)


def test_uniforms_fill_the_interval_and_do_not_go_together() -> None:
    u = draws.uniform(0, 1, MANY, count=4).double()
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    tolerance = 5 / len(MANY) ** 0.5  # five standard errors
    assert abs(float(u.mean()) - 0.5) < tolerance
    assert abs(float(u.var()) - 1 / 12) < tolerance
    correlation = torch.corrcoef(torch.cat([u.T, u.T.roll(1, dims=1)]))
    assert float((correlation - torch.eye(8)).abs().max()) < tolerance


def test_normals_have_the_moments_of_normals() -> None:
    x = draws.normal(0, MANY, count=2).double()
    tolerance = 5 / len(MANY) ** 0.5
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float((x**power).mean()) - expected) < tolerance * 10


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 2.0])
def test_beta_has_the_mean_and_variance_of_beta(alpha: float) -> None:
    x = draws.beta(alpha, 5, MANY)
    tolerance = 5 / len(MANY) ** 0.5
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    assert abs(float(x.mean()) - 0.5) < tolerance
    assert abs(float(x.var()) - 1 / (4 * (2 * alpha + 1))) < tolerance
