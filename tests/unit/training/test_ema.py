"""The average follows its formula, and the weights that are trained never notice."""

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.training.ema import decay_at, ema_applied, local_state, start_ema, update_ema


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def test_ema_follows_its_formula_and_leaves_the_weights_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ema = start_ema(model)
    weights = local_state(model)
    expected = {name: value.double().numpy() for name, value in ema.items()}
    for step in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        before, decay = bits(model), decay_at(step, 0.8, warmup=True)
        update_ema(ema, weights, decay)
        for name, value in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double().numpy()
        assert bits(model) == before
    for name, value in ema.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-5)


def test_ema_is_float32_and_not_a_view_of_narrower_weights() -> None:
    model = nn.Linear(3, 2).bfloat16()
    ema = start_ema(model)
    update_ema(ema, local_state(model), 0.5)
    assert {value.dtype for value in ema.values()} == {torch.float32}
    torch.testing.assert_close(ema["weight"], model.weight.detach().float(), rtol=0, atol=0)


def test_decay_warms_up_to_the_papers() -> None:
    assert [decay_at(step, 0.9999) for step in (0, 10**6)] == [0.9999, 0.9999]
    assert [decay_at(step, 0.9999, warmup=True) for step in (0, 8, 10**6)] == [0.1, 0.5, 0.9999]


def test_swapped_in_for_a_while_and_out_again_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ema, before = start_ema(other), bits(model)
    address = model.weight.data_ptr()
    with ema_applied(model, ema):
        assert bits(model) == bits(other)
        assert model.weight.data_ptr() == address
    assert bits(model) == before
    with pytest.raises(RuntimeError, match="halfway"), ema_applied(model, ema):
        raise RuntimeError("halfway")
    assert bits(model) == before
    assert {name: value.numpy().tobytes() for name, value in ema.items()} == bits(other)
