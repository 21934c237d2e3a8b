"""The three tasks without labels do what is published: what is hidden, what is predicted, and what counts in the loss."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitlab.core.errors import UsageError
from vitlab.data.rules import Preprocess
from vitlab.models.build import build, create_model
from vitlab.models.cost import count_params
from vitlab.models.ops import random_order
from vitlab.models.vit import ViT
from vitlab.training.freeze import layer_of_each
from vitlab.training.optim import decayed_names, make_optimizer
from vitlab.training.pretext import masked as masked_module
from vitlab.training.pretext.features import FeatureDistillation, teacher_for
from vitlab.training.pretext.mae import MaskedAutoencoder, hidden_losses, pixel_targets, restore
from vitlab.training.pretext.masked import (
    MaskedPatches,
    colour_classes,
    corrupt,
    draw_corruption,
    masked_losses,
)
from vitlab.training.pretext.task import ENCODER, Pretext, encoder_state, from_patches, patch_pixels
from vitlab.training.pretext_rules import count_task_macs, decoder_spec, num_seen
from vitlab.training.rules import FeaturesRule, MaeRule, MaskedRule, Objective, OptimRule

RGB = Preprocess(image_size=(16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
DECODER = MaeRule(decoder_width=16, decoder_depth=2, decoder_heads=2)


def vit(name: str = "ViT-w32d2m64h4/4", size: int = 16, channels: int = 3, **fields: Any) -> ViT:
    model = create_model(name, num_classes=0, image_size=size, in_channels=channels, overrides=fields, seed=0)
    assert isinstance(model, ViT)
    return model


def pictures(count: int = 3, size: int = 16) -> tuple[Tensor, Tensor]:
    """Bytes, and what `RGB` makes of them."""
    bytes_BCYX = torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(1)).float()
    mean, std = (torch.tensor(value)[:, None, None] for value in (RGB.mean, RGB.std))
    return bytes_BCYX, (bytes_BCYX / 255 - mean) / std


def started(task: Pretext) -> Pretext:
    task.start(seed=0)
    return task


# --- what all have in common ------------------------------------------------------------------------------------------


def test_patches_are_cut_in_the_order_of_the_embedding() -> None:
    model, (_, x_BCYX) = vit(), pictures()
    assert model.embed.bias is not None
    kernel = model.embed.weight.permute(0, 2, 3, 1).flatten(1)  # [D, P·P·C]: rows, columns, channels
    by_hand = patch_pixels(x_BCYX, 4) @ kernel.T + model.embed.bias
    torch.testing.assert_close(by_hand, model.embed_patches(x_BCYX)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["masked", "mae", "features"])
def test_task_starts_by_its_seed_and_every_parameter_of_its_own_has_a_gradient(kind: str) -> None:
    tasks = [task_of(kind, vit()) for _ in range(2)]
    for task, seed in zip(tasks, (3, 4), strict=True):
        for _, parameter in task.own_parameters():
            torch.nn.init.constant_(parameter, math.nan)
        task.start(seed)
    first, second = (dict(task.own_parameters()) for task in tasks)
    assert all(value.isfinite().all() for value in first.values())
    assert any(not torch.equal(first[name], second[name]) for name in first)
    loss_B = tasks[0](pictures()[1])
    assert loss_B.shape == (3,) and loss_B.dtype == torch.float32
    loss_B.sum().backward()
    lacking = [name for name, value in tasks[0].named_parameters() if value.grad is None]
    assert lacking == [], "several processes wait for every gradient"


def task_of(kind: str, encoder: ViT) -> Pretext:
    if kind == "masked":
        return started(MaskedPatches(encoder, MaskedRule(), RGB))
    if kind == "mae":
        return started(MaskedAutoencoder(encoder, DECODER))
    return started(FeatureDistillation(encoder, FeaturesRule(), teacher_for(vit(), RGB, encoder.spec, "t"), RGB))


@pytest.mark.parametrize("kind", ["masked", "mae", "features"])
def test_own_parameters_are_the_last_layer_and_only_matrices_decay(kind: str) -> None:
    task = task_of(kind, vit())
    layers, decayed, own = layer_of_each(task), decayed_names(task), dict(task.own_parameters())
    assert {layers[name] for name in own} == {3}
    assert layers[f"{ENCODER}blocks.0.norm1.weight"] == 1 and layers[f"{ENCODER}embed.weight"] == 0
    assert "mask" not in decayed and f"{ENCODER}cls" not in decayed and f"{ENCODER}pos.table" not in decayed
    assert {name for name in own if name.endswith("weight") and "norm" not in name} <= decayed
    assert f"{ENCODER}blocks.0.attn.qkv.weight" in decayed
    held = [p for group in make_optimizer(task, OptimRule(lr=0.1)).param_groups for p in group["params"]]
    assert len(held) == len(list(task.parameters()))


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_patches_are_put_together_again(size: tuple[int, int]) -> None:
    x_BCYX = torch.randn(2, 3, *size)
    assert from_patches(patch_pixels(x_BCYX, 4), 4, (size[0] // 4, size[1] // 4)).equal(x_BCYX)


@pytest.mark.parametrize("target", ["mae", "colour", "downsampled", "pixels"])
def test_painting_changes_hidden_patches_alone(target: Any) -> None:
    rule = MaskedRule(target=target) if target != "mae" else None
    task = started(MaskedAutoencoder(vit(), DECODER) if rule is None else MaskedPatches(vit(), rule, RGB)).eval()
    _, x_BCYX = pictures()
    torch.manual_seed(0)
    painting = task.paint(x_BCYX)
    assert painting is not None
    true, seen, painted = (patch_pixels(each, 4) for each in (x_BCYX, *painting))
    hidden_BN = (seen == 0).all(dim=2)
    assert hidden_BN.sum(dim=1).tolist() == [12 if rule is None else 8] * 3
    assert seen[~hidden_BN].equal(true[~hidden_BN]) and painted[~hidden_BN].equal(true[~hidden_BN])
    assert (painted[hidden_BN] != true[hidden_BN]).any(dim=1).all()


@pytest.mark.parametrize("target", ["colour", "downsampled"])
def test_sure_classes_are_painted_in_their_colours(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    """With logits for the true classes, each cell gets back its mean colour, to half a level."""
    task = started(MaskedPatches(vit(), MaskedRule(target=target), RGB))
    assert isinstance(task, MaskedPatches)
    bytes_BCYX, x_BCYX = pictures()
    index_BM = torch.arange(16).expand(3, -1)
    sure = F.one_hot(task.targets(x_BCYX), 512).float().flatten(2)
    monkeypatch.setattr(task, "_predict", lambda _: (sure, index_BM, (4, 4)))
    painted = (task.paint(x_BCYX)[1] * task.std_C11 + task.mean_C11) * 255
    cell = 4 if target == "colour" else 1
    assert (F.avg_pool2d(painted, cell) - F.avg_pool2d(bytes_BCYX, cell)).abs().max() <= 16 + 1e-3


def test_state_of_the_encoder_has_its_own_names() -> None:
    task = task_of("mae", vit())
    build(task.encoder.spec).load_state_dict(encoder_state(task.state_dict()))


# --- masked patch prediction ------------------------------------------------------------------------------------------


def test_half_of_the_patches_are_corrupted_and_of_these_80_10_10() -> None:
    torch.manual_seed(0)
    x_BND = torch.randn(400, 50, 4)
    drawn = draw_corruption(x_BND, 0.5)
    mask_D = torch.full((4,), 9.0)
    after_BND = corrupt(x_BND, mask_D, drawn)
    chosen_BN = torch.zeros(400, 50, dtype=torch.bool).scatter(1, drawn.index_BM, True)
    assert (chosen_BN.sum(dim=1) == 25).all()
    masked = (after_BND == 9).all(dim=2)
    same = (after_BND == x_BND).all(dim=2)
    assert same[~chosen_BN].all(), "the others are left alone"
    total = chosen_BN.sum()
    assert float(masked.sum() / total) == pytest.approx(0.8, abs=0.02)
    assert float((same & chosen_BN).sum() / total) == pytest.approx(0.1, abs=0.02)
    # The rest is the embedding of another patch of the same image.
    for i, j in (chosen_BN & ~masked & ~same).nonzero()[:200].tolist():
        found = (x_BND[i] == after_BND[i, j]).all(dim=1).nonzero()[:, 0].tolist()
        assert len(found) == 1 and found[0] != j
    assert len(set(drawn.index_BM.flatten().tolist())) == 50, "any patch"


def loop_classes(bytes_BCYX: Tensor, patch: int, cells: int) -> list[list[list[int]]]:
    """64·⌊R/32⌋ + 8·⌊G/32⌋ + ⌊B/32⌋ of the mean of each cell, in plain Python."""
    batch, channels, rows, cols = bytes_BCYX.shape
    side = patch // cells
    images: list[list[list[int]]] = []
    for b in range(batch):
        patches: list[list[int]] = []
        for top in range(0, rows, patch):
            for left in range(0, cols, patch):
                classes: list[int] = []
                for y in range(top, top + patch, side):
                    for x in range(left, left + patch, side):
                        number = 0
                        for c in range(channels):
                            total = sum(int(v) for v in bytes_BCYX[b, c, y : y + side, x : x + side].flatten())
                            number = 8 * number + total // (32 * side * side)
                        classes.append(number)
                patches.append(classes)
        images.append(patches)
    return images


@pytest.mark.parametrize(("cells", "patch"), [(1, 4), (4, 8), (4, 4)])
def test_classes_of_colours_are_those_of_a_loop(cells: int, patch: int) -> None:
    bytes_BCYX, _ = pictures(2)
    bytes_BCYX[0, :, :patch, :patch] = 32.0  # on the border between two classes
    bytes_BCYX[1, :, :patch, :patch] = 255.0
    found = colour_classes(bytes_BCYX, patch, cells)
    assert found.tolist() == loop_classes(bytes_BCYX, patch, cells)
    assert found[0, 0, 0] == 64 + 8 + 1 and found[1, 0, 0] == 511


def test_targets_are_of_the_bytes_that_were_normalised() -> None:
    bytes_BCYX, x_BCYX = pictures()
    bytes_BCYX[:, :, :4, :4] = 64.0
    mean, std = (torch.tensor(value)[:, None, None] for value in (RGB.mean, RGB.std))
    x_BCYX = (bytes_BCYX / 255 - mean) / std
    for rule, cells in ((MaskedRule(target="colour"), 1), (MaskedRule(target="downsampled"), 4)):
        task = MaskedPatches(vit(), rule, RGB)
        assert task.targets(x_BCYX).tolist() == loop_classes(bytes_BCYX, 4, cells)
    task = MaskedPatches(vit(), MaskedRule(target="pixels"), RGB)
    assert torch.equal(task.targets(x_BCYX), patch_pixels(x_BCYX, 4))


@pytest.mark.parametrize(
    ("target", "channels", "outputs"),
    [("colour", 3, 512), ("colour", 1, 8), ("downsampled", 3, 8192), ("pixels", 3, 48)],
)
def test_a_patch_has_as_many_outputs_as_its_target_asks_for(target: Any, channels: int, outputs: int) -> None:
    rule = dataclasses.replace(RGB, mode="array", mean=(0.5,) * channels, std=(0.5,) * channels)
    task = MaskedPatches(vit(channels=channels), MaskedRule(target=target), rule)
    assert task.head.out_features == outputs


@pytest.mark.parametrize("target", ["colour", "downsampled", "pixels"])
def test_loss_is_the_mean_over_corrupted_patches_and_looks_at_no_other(target: Any) -> None:
    torch.manual_seed(0)
    batch, patches, corrupted = 2, 6, 3
    index_BM = random_order(torch.zeros(batch, patches, 1))[:, :corrupted]
    rule = MaskedRule(target=target)
    if target == "pixels":
        targets, predicted = torch.randn(batch, patches, 12), torch.randn(batch, corrupted, 12)
        by_hand = [
            sum(float(((predicted[b, m] - targets[b, index_BM[b, m]]) ** 2).mean()) for m in range(corrupted))
            / corrupted
            for b in range(batch)
        ]
    else:
        cells = 1 if target == "colour" else 16
        targets = torch.randint(0, 512, (batch, patches, cells))
        predicted = torch.randn(batch, corrupted, cells * 512)
        by_hand = []
        for b in range(batch):
            terms = [
                -float(predicted[b, m, 512 * c : 512 * (c + 1)].log_softmax(0)[targets[b, index_BM[b, m], c]])
                for m in range(corrupted)
                for c in range(cells)
            ]
            by_hand.append(sum(terms) / len(terms))
    found = masked_losses(rule, predicted, targets, index_BM)
    assert found.tolist() == pytest.approx(by_hand, rel=1e-4)
    others = torch.ones(batch, patches, dtype=torch.bool).scatter(1, index_BM, False)
    changed = targets.clone()
    changed[others] = 1
    assert torch.equal(masked_losses(rule, predicted, changed, index_BM), found)
    changed[~others] = 1
    assert not torch.equal(masked_losses(rule, predicted, changed, index_BM), found)


def test_prediction_comes_from_the_token_of_the_corrupted_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that copies, on an encoder whose blocks do nothing: what a patch predicts is its own embedding."""
    encoder = vit(pos="none", pool="gap")
    with torch.no_grad():
        for name, parameter in encoder.blocks.named_parameters():
            if "proj" in name or "fc2" in name:
                parameter.zero_()
    task = MaskedPatches(encoder, MaskedRule(target="pixels"), RGB)
    task.start(seed=0)
    x_BCYX = pictures()[1]
    patches_BND, _ = encoder.embed_patches(x_BCYX)
    seen: list[tuple[Tensor, Tensor]] = []

    def losses(rule: MaskedRule, predicted_BMO: Tensor, targets: Tensor, index_BM: Tensor) -> Tensor:
        seen.append((predicted_BMO, index_BM))
        return masked_losses(rule, predicted_BMO, targets, index_BM)

    monkeypatch.setattr(masked_module, "_MASKED", 0.0)
    monkeypatch.setattr(masked_module, "_SWAPPED", 0.0)  # all that is corrupted stays as it was
    monkeypatch.setattr(masked_module, "masked_losses", losses)
    task(x_BCYX)
    predicted_BMO, index_BM = seen[0]
    for b in range(len(x_BCYX)):
        expected = task.head(encoder.norm(patches_BND[b, index_BM[b]]))
        torch.testing.assert_close(predicted_BMO[b], expected)


# --- masked autoencoders ----------------------------------------------------------------------------------------------


def test_encoder_sees_a_quarter_and_not_a_pixel_of_the_rest() -> None:
    model, (_, x_BCYX) = vit(), pictures()
    assert num_seen(16, 0.75) == 4 and num_seen(196, 0.75) == 49 and num_seen(4, 0.99) == 1
    torch.manual_seed(0)
    order_BN = random_order(torch.zeros(3, 16, 1))
    kept_index_BN, hidden_BN = order_BN[:, :4], order_BN[:, 4:]

    def encoded(x_BCYX: Tensor) -> Tensor:
        return model.encode_patches(*model.embed_patches(x_BCYX), kept_index_BN=kept_index_BN)

    assert encoded(x_BCYX).shape == (3, 1 + 4, 32)
    changed_BCYX = x_BCYX.clone()
    for b, n in [(b, n) for b, row in enumerate(hidden_BN.tolist()) for n in row]:
        row, col = 4 * (n // 4), 4 * (n % 4)
        changed_BCYX[b, :, row : row + 4, col : col + 4] = 7.0
    assert torch.equal(encoded(changed_BCYX), encoded(x_BCYX))
    assert not torch.equal(encoded(changed_BCYX + 0.1), encoded(x_BCYX))


def test_seen_patches_keep_their_positions() -> None:
    """On all patches in another order, the tokens are those of the whole image in that order."""
    several: list[dict[str, Any]] = [{}, {"pool": "gap"}, {"pos": "sincos2d"}, {"registers": 2}, {"pos": "learned2d"}]
    for fields in several:
        model, (_, x_BCYX) = vit(**fields), pictures()
        patches_BND, grid = model.embed_patches(x_BCYX)
        order_BN = random_order(patches_BND)
        whole = model.encode_patches(patches_BND, grid)
        shuffled = model.encode_patches(patches_BND, grid, kept_index_BN=order_BN)
        prefix = model.spec.num_prefix
        torch.testing.assert_close(shuffled[:, :prefix], whole[:, :prefix], rtol=1e-4, atol=1e-5)
        for b in range(3):
            torch.testing.assert_close(shuffled[b, prefix:], whole[b, prefix:][order_BN[b]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{"pos": "relative"}, {"attention": "axial", "pool": "gap"}, {"pos_at": "every"}])
def test_model_that_needs_the_whole_grid_refuses_some_patches(fields: dict[str, Any]) -> None:
    model, (_, x_BCYX) = vit(**fields), pictures()
    patches_BND, grid = model.embed_patches(x_BCYX)
    with pytest.raises(UsageError, match="plain ViT"):
        model.encode_patches(patches_BND, grid, kept_index_BN=random_order(patches_BND)[:, :4])


def test_every_patch_is_put_back_in_its_place() -> None:
    torch.manual_seed(0)
    true_BND = torch.randn(5, 16, 3)
    order_BN = random_order(true_BND)
    seen_BND = torch.stack([true_BND[b, order_BN[b, :6]] for b in range(5)])
    mask_D = torch.full((3,), 9.0)
    found = restore(seen_BND, mask_D, order_BN)
    for b in range(5):
        for n in range(16):
            wanted = true_BND[b, n] if n in order_BN[b, :6].tolist() else mask_D
            assert torch.equal(found[b, n], wanted)
    everything = torch.stack([true_BND[b, order_BN[b]] for b in range(5)])
    assert torch.equal(restore(everything, mask_D, order_BN), true_BND)


def test_decoder_gets_the_tokens_of_the_patches_that_come_first_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    task = started(MaskedAutoencoder(vit(), DECODER))
    x_BCYX, decode, seen = pictures()[1], MaskedAutoencoder.decode, list[tuple[Tensor, Tensor]]()

    def noted(self: MaskedAutoencoder, z_BTD: Tensor, order_BN: Tensor, grid: tuple[int, int]) -> Tensor:
        seen.append((z_BTD, order_BN))
        return decode(self, z_BTD, order_BN, grid)

    monkeypatch.setattr(MaskedAutoencoder, "decode", noted)
    task(x_BCYX)
    (z_BTD, order_BN), encoder = seen[0], task.encoder
    assert isinstance(task, MaskedAutoencoder)
    kept = encoder.encode_patches(*encoder.embed_patches(x_BCYX), kept_index_BN=order_BN[:, :4])
    assert torch.equal(z_BTD, task.embed(encoder.norm(kept)))


def test_decoder_fed_with_the_true_patches_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, targets and loss fit together: a decoder that copies what it is given paints each patch where it was."""
    task = started(MaskedAutoencoder(vit(), DECODER))
    x_BCYX = pictures()[1]
    targets_BNO = pixel_targets(x_BCYX, 4, normed=True)
    orders: list[Tensor] = []

    def cheating(self: MaskedAutoencoder, _z: Tensor, order_BN: Tensor, _grid: Any) -> Tensor:
        orders.append(order_BN)
        hidden = torch.stack([targets_BNO[b, order_BN[b]] for b in range(len(order_BN))])
        return restore(hidden, torch.zeros(48), order_BN)

    monkeypatch.setattr(MaskedAutoencoder, "decode", cheating)
    task.head = torch.nn.Identity()
    assert task(x_BCYX).abs().max() < 1e-10
    assert sorted(orders[0][0].tolist()) == list(range(16))


def test_targets_of_a_patch_have_mean_0_and_variance_1() -> None:
    x_BCYX = pictures()[1]
    plain, normed = (pixel_targets(x_BCYX, 4, normed=flag) for flag in (False, True))
    assert torch.equal(plain, patch_pixels(x_BCYX, 4))
    for b in range(3):
        for n in range(16):
            patch = plain[b, n]
            wanted = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            torch.testing.assert_close(normed[b, n], wanted)


def test_only_hidden_patches_count_in_the_loss() -> None:
    torch.manual_seed(0)
    predicted, targets = torch.randn(2, 16, 5), torch.randn(2, 16, 5)
    order_BN = random_order(predicted)
    hidden = order_BN[:, 4:]
    found = hidden_losses(predicted, targets, hidden)
    by_hand = [
        sum(float(((predicted[b, n] - targets[b, n]) ** 2).mean()) for n in hidden[b].tolist()) / 12 for b in range(2)
    ]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-5)
    for b in range(2):
        targets[b, order_BN[b, :4]] = 100.0
    assert torch.equal(hidden_losses(predicted, targets, hidden), found)


def test_decoder_knows_where_each_patch_is() -> None:
    """Without positions of its own, all hidden patches would be painted alike."""
    task = started(MaskedAutoencoder(vit(), DECODER))
    assert isinstance(task, MaskedAutoencoder)
    z_BTD = task.embed(torch.randn(1, 1 + 4, 32))
    order_BN = torch.arange(16)[None]
    painted_BND = task.decode(z_BTD, order_BN, (4, 4))
    assert painted_BND.shape == (1, 16, 16)
    assert len({tuple(row) for row in (painted_BND[0, 4:] * 1000).round().tolist()}) == 12


def test_cost_of_an_autoencoder_is_what_its_modules_multiply() -> None:
    task, x_BCYX = task_of("mae", vit()), pictures(1)[1]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused one is not counted
        task(x_BCYX)
    counted = counter.get_total_flops() / 2
    found = count_task_macs(Objective(kind="mae", mae=DECODER), task.encoder.spec)
    assert found == counted
    own = sum(value.numel() for _, value in task.own_parameters())
    spec = decoder_spec(task.encoder.spec, DECODER)
    assert count_params(spec) == pytest.approx(own, rel=0.2), "what memory is estimated by"


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_cost_of_patch_dropout_is_what_the_kept_patches_take(pool: str) -> None:
    model = vit(patch_dropout=0.7, pool=pool).train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(pictures(1)[1])
    assert count_task_macs(Objective(), model.spec) == counter.get_total_flops() / 2
    assert count_task_macs(Objective(), vit(pool=pool).spec) > (1.9 if pool == "map" else 2) * count_task_macs(
        Objective(), model.spec
    )


# --- distillation of features -----------------------------------------------------------------------------------------


def distilled(student: ViT, teacher: ViT, theirs: Preprocess = RGB, **rule: Any) -> FeatureDistillation:
    task = FeatureDistillation(student, FeaturesRule(**rule), teacher_for(teacher, theirs, student.spec, "t"), RGB)
    task.start(seed=0)
    return task


def as_identity(task: FeatureDistillation) -> None:
    with torch.no_grad():
        for projection in (task.image, task.patches):
            if projection is not None:
                projection.last.weight.copy_(torch.eye(len(projection.last.weight)))
                projection.last.bias.zero_()


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_loss_is_zero_where_the_student_is_the_teacher(pool: str) -> None:
    x_BCYX = pictures()[1]
    task = distilled(vit(pool=pool), vit(pool=pool))
    assert task(x_BCYX).min() > 0.1
    as_identity(task)
    assert task(x_BCYX).abs().max() < 1e-5


@torch.no_grad()
def test_loss_is_that_of_a_loop() -> None:
    x_BCYX, student, teacher = pictures()[1], vit(), vit("ViT-w48d1m64h4/4")
    task = distilled(student, teacher, patch_weight=0.3)
    assert task.patches is not None
    ours = student.features(x_BCYX, tokens="patches").layers[1]
    theirs = teacher.features(x_BCYX, tokens="patches").layers[0]
    wanted = []
    for b in range(3):
        a, c = task.image(student.represent(x_BCYX[b : b + 1]))[0], teacher.represent(x_BCYX[b : b + 1])[0]
        image = 1 - float(a @ c / (a.norm() * c.norm()))
        each = []
        for n in range(16):
            a, c = task.patches(ours[b, n]), theirs[b, n]
            each.append(1 - float(a @ c / (a.norm() * c.norm())))
        wanted.append(image + 0.3 * sum(each) / 16)
    assert task(x_BCYX).tolist() == pytest.approx(wanted, rel=1e-4)


def test_teacher_sees_the_pixels_in_its_own_range_on_the_grid_of_the_student() -> None:
    """A student of 4x4 patches of 4 pixels: a teacher of 2-pixel patches gets images of 8, normalised as it wants."""
    bytes_BCYX, x_BCYX = pictures()
    theirs = Preprocess(image_size=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), filter="bicubic")
    teacher = vit("ViT-w48d1m64h4/2", size=32)
    task = distilled(vit(), teacher, theirs)
    assert task.teacher.model.spec.grid == (4, 4) and task.teacher.model.spec.image_size == (8, 8)
    mean, std = (torch.tensor(value)[:, None, None] for value in (theirs.mean, theirs.std))
    small = torch.nn.functional.interpolate((bytes_BCYX / 255 - mean) / std, (8, 8), mode="bicubic", antialias=True)
    image_BD, patches_BND = task.teacher.tokens(x_BCYX * task.scale_C11 + task.shift_C11, (4, 4))
    torch.testing.assert_close(image_BD, teacher.represent(small), rtol=1e-3, atol=1e-4)
    expected = teacher.features(small, tokens="patches").layers[0]
    torch.testing.assert_close(patches_BND, expected, rtol=1e-3, atol=1e-4)


def test_teacher_that_cannot_have_the_grid_has_its_own_interpolated() -> None:
    teacher = vit("ViT-w48d1m64h4/4", size=32, pos="relative")  # 8x8 patches, and no others
    task = distilled(vit(), teacher)
    assert task.teacher.model.spec.grid == (8, 8)
    _, patches_BND = task.teacher.tokens(pictures()[1], (4, 4))
    assert patches_BND.shape == (3, 16, 48)
    assert task(pictures()[1]).isfinite().all()


def test_teacher_has_no_gradient_and_is_in_no_state_and_no_optimiser() -> None:
    task = distilled(vit(), vit("ViT-w48d1m64h4/4", dropout=0.5))
    teacher = task.teacher.model
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    task.train()
    assert not teacher.training, "its dropout is off"
    optimizer = make_optimizer(task, OptimRule(lr=0.1))
    task(pictures()[1]).sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    ours = {id(parameter) for parameter in task.parameters()}
    assert not ours & {id(parameter) for parameter in teacher.parameters()}
    assert not any("held" in name for name in task.state_dict())
    assert sum(v.numel() for v in task.state_dict().values()) == sum(p.numel() for p in task.parameters())


def test_without_patch_weight_the_image_alone_counts() -> None:
    task = distilled(vit(), vit(), patch_weight=0.0)
    assert task.patches is None
    as_identity(task)
    assert task(pictures()[1]).abs().max() < 1e-5


def test_teacher_that_cannot_teach_is_refused() -> None:
    with pytest.raises(UsageError, match="must be a Vision Transformer"):
        teacher_for(
            create_model("BiT-R50x1", num_classes=0, image_size=32, overrides={"trunk": {"stages": [1]}}),
            RGB,
            vit().spec,
            "t",
        )
    with pytest.raises(UsageError, match="1 channels, the student of 3"):
        teacher_for(vit(channels=1), RGB, vit().spec, "t")


def test_a_projection_of_two_layers_is_asked_for() -> None:
    task = distilled(vit(), vit("ViT-w48d1m64h4/4"), projection="mlp")
    assert task.image.first is not None and task.image.first.out_features == task.image.last.in_features == 48
