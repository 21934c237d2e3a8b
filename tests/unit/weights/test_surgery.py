"""Surgery keeps what it does not change: transfers, and every operation that `vitlab convert` offers."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.ops import resize_grid
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.models.vit import ViT
from vitlab.weights.bundle import Bundle
from vitlab.weights.surgery import (
    Changes,
    TransferReport,
    average,
    for_transfer,
    on_image_size,
    operate,
    with_channels,
    with_classes,
    with_cls_position,
    with_patch,
    with_zero_head,
    without_pre_logits,
)

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
    with pytest.raises(UsageError, match=f"model.{name} = .*recipe says {value}"):
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


def carried(old: ViTSpec, new: ViTSpec, positions: Any, seed: int = 0) -> tuple[ViT, ViT, TransferReport]:
    source, _, _ = transfer(old, new)
    return source, *for_transfer(source, new, positions, seed)


@pytest.mark.parametrize("pos_at", ["stem", "every"])
@pytest.mark.parametrize("size", [(16, 8), (8, 8), (20, 20)], ids=["longer", "shorter", "repeated"])
def test_positions_in_sequence_are_cut_or_repeated_in_raster_order(size: tuple[int, int], pos_at: Any) -> None:
    old, new = dataclasses.replace(OLD, pos_at=pos_at), changed(image_size=size, pos_at=pos_at)
    source, target, report = carried(old, new, "sequence")
    before, after = source.pos.table, target.pos.table
    assert before is not None and after is not None and len(after) == (2 if pos_at == "every" else 1)
    assert torch.equal(after[:, 0], before[:, 0])  # the class token's
    for patch in range(new.grid[0] * new.grid[1]):
        assert torch.equal(after[:, 1 + patch], before[:, 1 + patch % 6])
    assert report.resized == f"2x3 -> {new.grid[0]}x{new.grid[1]}, positions in sequence, not interpolated"


def test_positions_in_sequence_stay_on_the_same_grid() -> None:
    source, target, report = carried(OLD, changed(image_size=OLD.image_size), "sequence")
    assert source.pos.table is not None and target.pos.table is not None
    assert torch.equal(source.pos.table, target.pos.table) and report.resized is None


def test_tables_of_rows_and_columns_follow_each_in_its_own_sequence() -> None:
    old = dataclasses.replace(OLD, pos="learned2d")
    source, target, _ = carried(old, changed(pos="learned2d"), "sequence")
    for name, places in (("rows", [0, 1, 0, 1]), ("cols", [0, 1]), ("cls", [0])):
        before, after = getattr(source.pos, name), getattr(target.pos, name)
        assert torch.equal(after, before[:, places])


@pytest.mark.parametrize("size", [(16, 8), OLD.image_size], ids=str)
def test_fresh_positions_are_drawn_by_the_seed_and_the_class_token_keeps_its_own(size: tuple[int, int]) -> None:
    new = changed(image_size=size)
    source, target, report = carried(OLD, new, "fresh", seed=1)
    assert source.pos.table is not None and target.pos.table is not None
    assert torch.equal(target.pos.table[:, 0], source.pos.table[:, 0])
    assert 0 < target.pos.table[:, 1:].abs().max() < 0.1 < source.pos.table.abs().max()
    again, other = (carried(OLD, new, "fresh", seed)[1].pos.table for seed in (1, 2))
    assert torch.equal(again, target.pos.table) and not torch.equal(other, target.pos.table)
    assert report.resized == f"{new.grid[0]}x{new.grid[1]}, positions drawn anew"


def test_other_starts_are_refused_where_there_are_no_tables() -> None:
    for pos in ("none", "sincos2d"):
        with pytest.raises(UsageError, match="init_positions=fresh is for learned position tables"):
            carried(dataclasses.replace(OLD, pos=pos), changed(pos=pos), "fresh")
    spec = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(32, 32), num_classes=4)
    with pytest.raises(UsageError, match="init_positions=sequence"):
        for_transfer(build(spec, seed=0), spec, "sequence")


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


# --- the other operations ---------------------------------------------------------------------------------------------

RGB = dataclasses.replace(OLD, in_channels=3, head="linear")
UNEVEN = Preprocess(image_size=(8, 12), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def trained(spec: Any, seed: int = 0) -> Any:
    """A model with random numbers everywhere, in double, so that equal means equal."""
    model = build(spec, seed=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.double().eval()


def images(channels: int = 3, size: tuple[int, int] = (8, 12)) -> torch.Tensor:
    return torch.rand(2, channels, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def normalised(pixels: torch.Tensor, rule: Preprocess) -> torch.Tensor:
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (rule.mean, rule.std))
    return (pixels - mean) / std


def test_kept_classes_keep_their_logits_in_the_order_asked_for() -> None:
    model = trained(OLD)
    x = images(1)
    torch.testing.assert_close(with_classes(model, [4, 0])(x), model(x)[:, [4, 0]])


def test_pre_logits_are_left_out_and_nothing_else() -> None:
    model = trained(OLD)
    bare = without_pre_logits(model)
    assert model.state_dict().keys() - bare.state_dict().keys() == {"pre_logits.weight", "pre_logits.bias"}
    seen = with_zero_head(bare, 0)
    torch.testing.assert_close(bare(images(1)), bare.head(seen(images(1))))


@pytest.mark.parametrize("patch", [2, 6, 8, 7])
def test_a_larger_patch_sees_an_enlarged_picture_as_the_old_one_saw_the_old(patch: int) -> None:
    model = trained(RGB)
    resized = with_patch(model, patch)
    assert resized.spec.grid == model.spec.grid
    small = images()
    large = torch.nn.functional.interpolate(
        small.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(0, 2),
        size=(patch, patch),
        mode="bilinear",
        antialias=True,
    )
    before = model.embed(small).flatten(2).mT.flatten(0, 1)
    after = resized.embed(large).flatten(1)
    if patch > 4:
        torch.testing.assert_close(after, before)
    else:  # what shrinking loses no kernel brings back, but nothing linear does better
        flat, target = large.flatten(1), before - model.embed.bias
        assert torch.nn.functional.mse_loss(after, before) < target.square().mean()
        assert flat.shape[1] < 4 * 4 * 3


def test_patch_of_a_hybrid_is_refused() -> None:
    hybrid = dataclasses.replace(RGB, stem=TrunkSpec(stages=(1,)), patch=1)
    with pytest.raises(UsageError, match="feature map"):
        with_patch(trained(hybrid), 2)


def test_grey_pictures_give_what_they_gave_in_colour() -> None:
    model = trained(RGB)
    grey, rule = with_channels(model, UNEVEN, 1)
    assert rule.mode == "L"
    x = images(1)
    torch.testing.assert_close(grey(normalised(x, rule)), model(normalised(x.expand(-1, 3, -1, -1), UNEVEN)))


@pytest.mark.parametrize("name", ["hybrid", "bit"])
def test_resnet_gets_its_channels_too_and_is_reported_to_need_training(name: str) -> None:
    stem = TrunkSpec(stages=(1,))
    spec = dataclasses.replace(RGB, stem=stem, patch=1) if name == "hybrid" else BiTSpec(trunk=bit_trunk((1,), 1))
    model = trained(dataclasses.replace(spec, image_size=(8, 12), num_classes=5))
    labels = ("a", "b", "c", "d", "e")
    grey, printed = operate(Bundle(model, UNEVEN, labels, "card", {}), Changes(channels=1))
    root = "stem.root.weight" if name == "hybrid" else "trunk.root.weight"
    old, new = model.state_dict()[root], grey.model.state_dict()[root]
    scale = torch.tensor(UNEVEN.std, dtype=torch.float64).mean() / torch.tensor(UNEVEN.std, dtype=torch.float64)
    torch.testing.assert_close(new, (old * scale.view(1, 3, 1, 1)).sum(1, keepdim=True))
    assert printed == ["channels 3 -> 1, kernels added up; not exact here, so fine-tune it"]


def test_more_channels_repeat_the_old_ones_and_keep_their_sum() -> None:
    model = trained(RGB)
    six, rule = with_channels(model, UNEVEN, 6)
    assert (rule.mode, rule.mean) == ("array", UNEVEN.mean * 2)
    x = images()
    torch.testing.assert_close(six(x.repeat(1, 2, 1, 1)), model(x))
    three, back = with_channels(*with_channels(model, UNEVEN, 1), 3)
    assert back.mode == "RGB"
    assert three(images()).isfinite().all()


def test_folding_the_class_position_changes_no_bit_of_the_answer() -> None:
    model = trained(RGB)
    folded = with_cls_position(model, False)
    again = with_cls_position(folded, True)
    x = images()
    assert torch.equal(folded(x), model(x))
    assert torch.equal(again(x), model(x))
    assert folded.pos.table.shape[1] == again.pos.table.shape[1] - 1
    assert with_cls_position(model, True) is model
    with pytest.raises(UsageError, match="no learned class-token position"):
        with_cls_position(trained(dataclasses.replace(RGB, pool="gap")), False)


def test_mean_of_checkpoints_is_the_mean_of_each_weight() -> None:
    models = [trained(RGB, seed) for seed in range(3)]
    mean = average(models).state_dict()
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, torch.stack([model.state_dict()[name] for model in models]).mean(0))
    with pytest.raises(UsageError, match="no mean"):
        average([models[0], trained(dataclasses.replace(RGB, num_classes=4))])


def test_bit_takes_a_new_head_too() -> None:
    spec = BiTSpec(trunk=bit_trunk((1, 1), 1), num_classes=5)
    model = trained(spec)
    target, report = for_transfer(model, dataclasses.replace(spec, num_classes=2, image_size=(64, 64)))
    assert target.head.weight.shape[0] == 2
    assert not target.head.weight.any()
    assert str(report).endswith("head replaced by a zero head, 5 -> 2")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: with_zero_head(m, 2),
        lambda m: with_classes(m, [0]),
        lambda m: with_patch(m, 8),
        lambda m: with_channels(m, UNEVEN, 1)[0],
        lambda m: with_cls_position(m, False),
        lambda m: on_image_size(m, (16, 16)),
    ],
)
def test_an_operation_leaves_its_source_alone_and_keeps_the_precision(change: Any) -> None:
    model = trained(RGB).half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = change(model)
    assert all(tensor.dtype == torch.float16 for tensor in made.state_dict().values())
    assert model.spec == RGB
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- as a person asks for them ----------------------------------------------------------------------------------------


def bundle(labels: tuple[str, ...] = ("ant", "bee", "cat", "crane", "crane")) -> Bundle:
    return Bundle(trained(RGB).float(), UNEVEN, labels, "card", {})


def test_changes_are_reported_in_one_sentence_each() -> None:
    asked = Changes(labels=("cat", "ant"), image_size=(16, 24), pos_resize="bicubic", channels=1, cls_in_pos=False)
    changed_bundle, printed = operate(bundle(), asked)
    assert changed_bundle.labels == ("cat", "ant")
    assert changed_bundle.preprocess.image_size == changed_bundle.model.spec.image_size == (16, 24)
    assert printed == [
        "head kept for 2 of 5 classes",
        "grid 2x3 -> 4x6, bicubic",
        "images 8x12 -> 16x24",
        "channels 3 -> 1, kernels added up",
        "class-token position folded into the token",
    ]


def test_another_patch_keeps_the_picture_where_it_can() -> None:
    same, _ = operate(bundle(), Changes(patch_size=2))
    assert (same.model.spec.image_size, same.model.spec.grid) == ((8, 12), (4, 6))
    grown, printed = operate(bundle(), Changes(patch_size=5))
    assert (grown.model.spec.image_size, grown.model.spec.grid) == ((10, 15), (2, 3))
    assert grown.preprocess.image_size == (10, 15)
    assert "images 8x12 -> 10x15" in printed


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"labels": ("dog",)}, "unknown label 'dog'"),
        ({"labels": ("crane",)}, "'crane' names 2 classes: 3, 4"),
        ({"labels": ("ant",), "classes": 3}, "give one of them"),
        ({"classes": -1}, "must not be negative"),
        ({"image_size": 9}, "does not divide"),
        ({"patch_size": 0}, "at least 1 pixel"),
        ({"channels": 0}, "at least 1 input channel"),
        ({"pos_resize": "nearest"}, "unknown value for pos_resize"),
    ],
)
def test_impossible_changes_are_refused_in_words(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        operate(bundle(), Changes(**asked))


def test_a_number_names_a_class_where_a_name_cannot() -> None:
    changed_bundle, _ = operate(bundle(), Changes(labels=("4", "bee")))
    assert changed_bundle.labels == ("crane", "bee")
