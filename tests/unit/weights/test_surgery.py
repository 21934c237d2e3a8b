"""A transfer keeps the body, starts from a zero head, and carries the positions to the new grid."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.models.build import build
from vitlab.models.ops import resize_grid
from vitlab.models.spec import ViTSpec
from vitlab.models.vit import ViT
from vitlab.weights.surgery import TransferReport, for_transfer

OLD = ViTSpec(
    width=8, depth=2, mlp_dim=16, heads=2, patch=4, image_size=(8, 12), in_channels=1, num_classes=5, head="mlp-tanh"
)
NEW = dataclasses.replace(OLD, image_size=(16, 8), num_classes=3, head="linear")


def transfer(old: ViTSpec = OLD, new: ViTSpec = NEW) -> tuple[ViT, ViT, TransferReport]:
    """The old model with random weights everywhere, the new one, and the report."""
    source = build(old, seed=0)
    assert isinstance(source, ViT)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(2))
    target, report = for_transfer(source, new)
    return source, target, report


def changed(**changes: Any) -> ViTSpec:
    return dataclasses.replace(NEW, **changes)


def test_new_head_is_zero_so_that_every_class_is_equally_likely() -> None:
    _, target, _ = transfer()
    p_BK = target.eval()(torch.randn(4, 1, 16, 8)).softmax(dim=1)
    assert torch.equal(p_BK, torch.full((4, 3), 1 / 3))
    assert target.head is not None
    assert not target.head.weight.any()
    assert not target.head.bias.any()


def test_body_is_kept_bit_for_bit() -> None:
    source, target, report = transfer()
    old, new = source.state_dict(), target.state_dict()
    body = [name for name in new if not name.startswith("head.") and name != "pos.table"]
    assert all(torch.equal(new[name], old[name]) for name in body)
    assert report.kept == len(body) + 1
    assert "pre_logits.weight" not in new


@pytest.mark.parametrize("how", ["corner-bilinear", "bilinear", "bicubic", "bicubic-antialias"])
def test_positions_are_carried_to_the_new_grid_by_the_new_rule(how: Any) -> None:
    source, target, report = transfer(new=changed(pos_resize=how))
    assert source.pos.table is not None
    assert target.pos.table is not None
    before, after = source.pos.table.detach(), target.pos.table.detach()
    assert torch.equal(after[:, :1], before[:, :1]), "the class slot is not part of the grid"
    assert torch.equal(after[:, 1:], resize_grid(before[:, 1:], (2, 3), (4, 2), how))
    assert report.resized == f"2x3 -> 4x2, {how}"


def test_same_grid_is_not_resized() -> None:
    source, target, report = transfer(new=changed(image_size=(8, 12)))
    assert source.pos.table is not None
    assert target.pos.table is not None
    assert torch.equal(target.pos.table, source.pos.table)
    assert report.resized is None


@pytest.mark.parametrize("pos_at", ["every", "shared"])
def test_every_position_table_is_carried(pos_at: Any) -> None:
    source, target, _ = transfer(dataclasses.replace(OLD, pos_at=pos_at), changed(pos_at=pos_at))
    assert source.pos.table is not None
    assert target.pos.table is not None
    assert target.pos.table.shape == (2 if pos_at == "every" else 1, 9, 8)
    for before, after in zip(source.pos.table.detach(), target.pos.table.detach(), strict=True):
        assert torch.equal(after[None, 1:], resize_grid(before[None, 1:], (2, 3), (4, 2), "corner-bilinear"))


def test_model_without_a_class_slot_is_carried_whole() -> None:
    source, target, _ = transfer(dataclasses.replace(OLD, cls_in_pos=False), changed(cls_in_pos=False))
    assert source.pos.table is not None
    assert target.pos.table is not None
    assert torch.equal(target.pos.table, resize_grid(source.pos.table, (2, 3), (4, 2), "corner-bilinear"))


@pytest.mark.parametrize(
    "change",
    [
        *({"width": 16}, {"depth": 3}, {"mlp_dim": 8}, {"heads": 4}, {"patch": 2}, {"in_channels": 3}, {"pool": "gap"}),
        *({"pos": "none"}, {"gelu": "exact"}, {"norm_eps": 1e-5}, {"registers": 1}, {"layer_scale": 0.1}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_body_is_refused_with_both_values(change: dict[str, Any]) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(UsageError, match=f"model.{name} = .*, but the recipe says {value}"):
        transfer(new=changed(**change))


def test_regularisation_may_differ() -> None:
    _, target, _ = transfer(new=changed(dropout=0.1, attention_dropout=0.2, stochastic_depth=0.3))
    assert target.spec == changed(dropout=0.1, attention_dropout=0.2, stochastic_depth=0.3)


@pytest.mark.parametrize("pos", ["relative"])
def test_positions_that_cannot_be_carried_are_refused(pos: Any) -> None:
    with pytest.raises(UsageError, match="cannot be carried to another grid"):
        transfer(dataclasses.replace(OLD, pos=pos), changed(pos=pos))
    same_grid = changed(pos=pos, image_size=OLD.image_size)
    assert transfer(dataclasses.replace(OLD, pos=pos), same_grid)[1].spec == same_grid


def test_source_is_left_as_it_was() -> None:
    source, target, _ = transfer()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())


def test_report_reads_as_one_line() -> None:
    _, _, report = transfer()
    assert str(report) == (
        f"{report.kept} tensors kept; head and pre_logits replaced by a zero head, 5 -> 3; "
        "grid 2x3 -> 4x2, corner-bilinear"
    )
