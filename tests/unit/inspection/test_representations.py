"""What a model makes of images, beside NumPy, formulas written out, and cases whose answer is known."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.core.errors import UsageError
from vitlab.inspection import representations
from vitlab.inspection.representations import (
    LayerFeatures,
    Patch,
    TokenNorms,
    cka,
    layer_features,
    logit_lens,
    nearest_patches,
    patch_pca,
    pick_queries,
    token_norms,
)
from vitlab.models.build import build
from vitlab.models.resnet import BiT
from vitlab.models.spec import BiTSpec, ViTSpec, bit_trunk
from vitlab.models.tape import Tape
from vitlab.models.vit import ViT

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))
REAL = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"


def vit(**changes: object) -> ViT:
    fields = {"width": 32, "depth": 3, "mlp_dim": 64, "heads": 2, "patch": 4, "image_size": (16, 24), "num_classes": 5}
    model = build(ViTSpec(**(fields | changes)), seed=0)  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    if model.head is not None:  # which starts at zero, and so would every logit
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- patch features in colour -----------------------------------------------------------------------------------------


def test_colours_are_the_three_strongest_components_by_numpy() -> None:
    features_BND = noise(30, 24, 10) * torch.linspace(3, 0.5, 10) + 7
    found = patch_pca(features_BND, (4, 6))
    assert found.colours_BYX3.shape == (30, 4, 6, 3)
    assert found.colours_BYX3.min() == 0 and found.colours_BYX3.max() == 1
    rows = features_BND.flatten(0, 1).double().numpy()
    _, singular, vectors = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(found.explained_3.numpy(), (singular**2 / (singular**2).sum())[:3], rtol=1e-5)
    for k in range(3):
        colour = found.colours_BYX3[..., k].flatten().numpy()
        inside = (colour > 0) & (colour < 1)  # the others are beyond the percentiles
        assert inside.mean() > 0.95
        assert abs(np.corrcoef(colour[inside], (rows @ vectors[k])[inside])[0, 1]) == pytest.approx(1, abs=1e-6)


def test_colours_do_not_depend_on_the_order_of_the_images() -> None:
    features_BND = noise(4, 24, 40)  # and more channels than patches of one image
    order = torch.tensor([2, 0, 3, 1])
    direct, shuffled = patch_pca(features_BND, (4, 6)), patch_pca(features_BND[order], (4, 6))
    torch.testing.assert_close(shuffled.colours_BYX3, direct.colours_BYX3[order], atol=1e-5, rtol=0)


def test_one_extreme_patch_does_not_take_the_colours_of_all_others() -> None:
    features_BND = noise(4, 100, 8)
    features_BND[0, 0] *= 1000
    red = patch_pca(features_BND, (10, 10)).colours_BYX3[..., 0]
    assert red.flatten()[1:].std() > 0.1


def test_components_that_are_not_there_are_grey() -> None:
    features_BND = torch.zeros(1, 6, 5)
    features_BND[:, :, 0] = torch.arange(6.0)
    found = patch_pca(features_BND, (2, 3))
    assert (found.colours_BYX3[..., 1:] == 0.5).all() and found.explained_3.tolist() == [1, 0, 0]
    assert (patch_pca(torch.ones(2, 6, 5), (2, 3)).colours_BYX3 == 0.5).all()


def test_features_that_do_not_fill_the_grid_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[images, 6, width\] for a 2x3 grid, not \[1, 7, 4\]"):
        patch_pca(torch.zeros(1, 7, 4), (2, 3))


# --- nearest patches --------------------------------------------------------------------------------------------------


def test_nearest_patch_in_a_copy_of_the_image_is_the_same_patch() -> None:
    features_BND = noise(3, 24, 16)
    features_BND[2] = 5 * features_BND[0]  # cosine: the length does not matter
    queries = [Patch(0, 0, 0), Patch(0, 3, 5), Patch(0, 2, 1)]
    found = nearest_patches(features_BND, (4, 6), queries, top=2)
    assert found.queries == tuple(queries)
    for query, matches in zip(queries, found.matches, strict=True):
        assert [match.patch.image for match in matches] == [1, 1, 2, 2], "not its own image, and two of every other"
        copy = matches[2]
        assert copy.patch == Patch(2, query.row, query.col) and copy.similarity == pytest.approx(1, abs=1e-6)
        assert matches[0].similarity >= matches[1].similarity


def test_similarity_maps_are_cosines_with_every_patch() -> None:
    features_BND = noise(2, 24, 16)
    found = nearest_patches(features_BND, (4, 6), [Patch(1, 2, 3)])
    assert found.similarity_QBYX.shape == (1, 2, 4, 6)
    expected = torch.cosine_similarity(features_BND[1, 15], features_BND[0, 7], dim=0)
    torch.testing.assert_close(found.similarity_QBYX[0, 0, 1, 1], expected)
    best = found.matches[0][0]
    assert best.similarity == found.similarity_QBYX[0, 0].max()
    assert best.similarity == found.similarity_QBYX[0, best.patch.image, best.patch.row, best.patch.col]


@pytest.mark.parametrize("query", [Patch(2, 0, 0), Patch(0, 4, 0), Patch(0, 0, 6), Patch(0, -1, 0)])
def test_a_query_outside_the_images_is_refused(query: Patch) -> None:
    with pytest.raises(UsageError, match="there is no patch"):
        nearest_patches(noise(2, 24, 16), (4, 6), [query])


Places = dict[int, tuple[int, int]]  # by image: row and column of the upper left patch of a thing of 3x3


def with_things(*things: Places) -> torch.Tensor:
    """Features [4, 100, 64] of noise, with the patches of each thing in some of the images."""
    features_BYXD = noise(4, 10, 10, 64)
    for number, places in enumerate(things, start=1):
        thing_33D = noise(3, 3, 64, seed=number) + 2 * noise(64, seed=100 + number)
        for image, (row, col) in places.items():
            features_BYXD[image, row : row + 3, col : col + 3] = thing_33D
    return features_BYXD.flatten(1, 2)


def lies_on(query: Patch, places: Places) -> bool:
    row, col = places.get(query.image, (99, 99))
    return row <= query.row < row + 3 and col <= query.col < col + 3


NOSE: Places = {0: (2, 5), 1: (6, 1), 3: (4, 4)}
EAR: Places = {0: (6, 1), 1: (1, 6), 2: (5, 5), 3: (1, 1)}


def test_picked_queries_lie_on_different_things_of_different_images() -> None:
    first, second = pick_queries(with_things(NOSE, EAR), (10, 10), 2)
    assert (lies_on(first, NOSE) and lies_on(second, EAR)) or (lies_on(first, EAR) and lies_on(second, NOSE))
    assert first.image != second.image, "no image gives more than its share"


def test_picked_queries_are_the_same_every_time_and_avoid_what_is_excluded() -> None:
    features_BND = with_things(NOSE, EAR)
    first = pick_queries(features_BND, (10, 10), 4)
    assert first == pick_queries(features_BND.clone(), (10, 10), 4)
    excluded = torch.zeros(4, 10, 10, dtype=torch.bool)
    for image, row, col in first:
        excluded[image, row, col] = True
    assert not set(first) & set(pick_queries(features_BND, (10, 10), 4, exclude_BYX=excluded))


def test_a_lone_patch_that_all_images_have_is_not_picked_before_a_thing() -> None:
    features_BND = with_things(NOSE, EAR)
    features_BND[:, 8 * 10 + 8] = noise(64, seed=9)  # as artefacts are: equal to each other, and to nothing around them
    picked = pick_queries(features_BND, (10, 10), 2)
    assert all(lies_on(query, NOSE) or lies_on(query, EAR) for query in picked)


def test_the_edge_of_a_large_grid_is_not_picked() -> None:
    at_the_edge: Places = {0: (0, 0), 1: (7, 7), 2: (0, 7), 3: (7, 0)}
    for _, row, col in pick_queries(with_things(at_the_edge), (10, 10), 8):
        assert 1 <= row <= 8 and 1 <= col <= 8


def test_queries_need_two_images_and_are_never_more_than_there_are_patches() -> None:
    with pytest.raises(UsageError, match="only one image"):
        pick_queries(noise(1, 24, 16), (4, 6))
    assert len(pick_queries(noise(2, 4, 16), (2, 2), 20)) == 8


# --- token norms ------------------------------------------------------------------------------------------------------


def test_norms_are_those_of_every_blocks_output() -> None:
    model, x = vit(registers=2), images(10)  # more than pass through the model at a time
    found = token_norms(model, x)
    tape = Tape()
    model(x, tape)
    assert found.norms_LBT.shape == (3, 10, 27) and found.tokens[:3] == ("cls", "register0", "register1")
    assert found.num_prefix == 3 and found.grid == (4, 6)
    for block in range(3):
        by_hand = tape[f"block{block:02d}/+mlp"].square().sum(dim=-1).sqrt()
        torch.testing.assert_close(found.norms_LBT[block], by_hand)


def test_a_random_model_has_no_outliers() -> None:
    found = token_norms(vit(), images(8))
    assert found.counts == (0,) * 8 and found.places == () and found.layer == 2


def test_patches_that_are_blown_up_in_one_block_are_found_there() -> None:
    model, x = vit(), images(4)
    grown = token_norms(model, x).norms_LBT.clone()
    # The embedding of two patches is made to stand out by their pixels, which every later block inherits.
    x[1, :, 4:8, 8:12] *= 100
    x[3, :, 12:16, 20:24] *= 100
    found = token_norms(model, x)
    assert found.places == (Patch(1, 1, 2), Patch(3, 3, 5)) and found.counts == (0, 1, 0, 1)
    assert (found.outliers_LBYX.sum(dim=(1, 2, 3)) == 2).all()
    assert found.norms_LBT[0, 1, 1 + 8] > 2 * grown[0, 1, 1 + 8]


def test_threshold_is_twice_the_median_or_five_spreads_above_it() -> None:
    found = token_norms(vit(), images(4))
    for block in range(3):
        logs = found.norms_LBT[block, :, 1:].flatten().double().log().numpy()
        median = np.sort(logs)[(len(logs) - 1) // 2]
        spread = 1.4826 * np.sort(np.abs(logs - median))[(len(logs) - 1) // 2]
        expected = np.exp(median) * max(2, np.exp(5 * spread))
        assert found.thresholds_L[block].item() == pytest.approx(expected, rel=1e-5)


def test_the_layer_shown_is_the_one_with_most_outliers() -> None:
    none = token_norms(vit(), images(2))
    outliers = none.outliers_LBYX.clone()
    outliers[1, 0, 2, 3] = True
    some = dataclasses.replace(none, outliers_LBYX=outliers)
    assert some.layer == 1 and some.places == (Patch(0, 2, 3),) and some.counts == (1, 0)


# --- CKA --------------------------------------------------------------------------------------------------------------


def features_of(*layers: torch.Tensor) -> LayerFeatures:
    return LayerFeatures(layers, "cls")


def textbook_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Kornblith et al. (2019), Eq. 3 and 4: HSIC of the Gram matrices, with the centring matrix written out."""
    samples = len(x)
    h = np.eye(samples) - np.ones((samples, samples)) / samples

    def hsic(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
        return np.trace(k @ h @ l @ h) / (samples - 1) ** 2

    k, l = x @ x.T, y @ y.T  # noqa: E741
    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


def unbiased_cka(x: np.ndarray, y: np.ndarray) -> float:
    """The same with the unbiased HSIC of Nguyen et al. (2021), Eq. 3."""
    n, ones = len(x), np.ones(len(x))

    def hsic(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
        middle = (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
        return (np.trace(k @ l) + middle - 2 / (n - 2) * (ones @ k @ l @ ones)) / (n * (n - 3))

    k, l = x @ x.T, y @ y.T  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    return hsic(k, l) / np.sqrt(hsic(k, k) * hsic(l, l))


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("samples", [6, 50])  # fewer than channels, and more
def test_cka_is_the_formula_written_out(debiased: bool, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(representations, "_BLOCK_BYTES", 8 * 5 * samples * 4)  # four rows at a time
    x, y = noise(samples, 12) + 3, noise(samples, 20, seed=1)
    y[:, :12] += 0.5 * x
    found = cka(features_of(x, y), features_of(y, noise(samples, 7, seed=2), x), debiased=debiased)
    assert found.shape == (2, 3)
    formula = unbiased_cka if debiased else textbook_cka
    assert found[0, 0].item() == pytest.approx(formula(x.double().numpy(), y.double().numpy()), abs=1e-6)
    assert found[1, 2].item() == pytest.approx(found[0, 0].item(), abs=1e-6)
    torch.testing.assert_close(found[[0, 1], [2, 0]], torch.ones(2))


@pytest.mark.parametrize("debiased", [False, True])
def test_cka_does_not_see_rotation_scale_or_shift(debiased: bool) -> None:
    x, y = noise(40, 16), noise(40, 16, seed=1)
    y += x
    rotation, _ = torch.linalg.qr(noise(16, 16, seed=2))
    stretched = x * torch.linspace(0.1, 5, 16)
    found = cka(features_of(x), features_of(y, 30 * y @ rotation + 4, stretched @ rotation), debiased=debiased)[0]
    torch.testing.assert_close(found[0], found[1])
    assert found[2] < 0.95, "a stretch along one axis is seen"


@pytest.mark.parametrize("debiased", [False, True])
def test_cka_of_a_model_with_itself_is_one(debiased: bool) -> None:
    model = vit()
    features = layer_features(model, [images(12), images(5, seed=1)])
    assert features.images == 17 and features.tokens == "cls" and len(features.layers) == 3
    found = cka(features, debiased=debiased)
    torch.testing.assert_close(found.diagonal(), torch.ones(3))
    torch.testing.assert_close(found, found.T)
    torch.testing.assert_close(cka(features, features, debiased=debiased), found)


def test_noise_is_unrelated_only_where_cka_is_debiased() -> None:
    few_images = features_of(noise(10, 500)), features_of(noise(10, 500, seed=1))
    assert cka(*few_images, debiased=False).item() > 0.9
    assert abs(cka(*few_images).item()) < 0.3


def test_a_layer_that_is_the_same_for_all_images_is_related_to_nothing() -> None:
    found = cka(features_of(noise(8, 4), torch.full((8, 4), 3.7)))
    assert found.tolist() == [[pytest.approx(1), 0], [0, 0]]


def test_layer_features_are_those_of_the_model_whatever_the_batches() -> None:
    model, x = vit(), images(11)
    found = layer_features(model, iter(x.split(4)), tokens="mean")
    expected = model.features(x, tokens="mean", layers=[0, 1, 2])
    for block in range(3):
        torch.testing.assert_close(found.layers[block], expected.layers[block].detach())
    assert found.tokens == "mean" and not found.layers[0].requires_grad


def test_two_kinds_of_model_are_compared_on_the_same_images() -> None:
    bit = build(BiTSpec(trunk=bit_trunk((1, 1), 1), image_size=(16, 24)), seed=0)
    assert isinstance(bit, BiT)
    x = images(6)
    assert cka(layer_features(vit(), [x]), layer_features(bit, [x])).shape == (3, 2)


def test_cka_refuses_other_images_and_too_few() -> None:
    with pytest.raises(UsageError, match="same images; these have 5 and 6"):
        cka(features_of(noise(5, 3)), features_of(noise(6, 3)))
    with pytest.raises(UsageError, match="at least 4 images, not 3"):
        cka(features_of(noise(3, 3)))
    with pytest.raises(UsageError, match="no images"):
        layer_features(vit(), [])


# --- the head on every layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "mlp-tanh"},
        {"pool": "gap"},
        {"pool": "map"},
        {"registers": 2},
        {"pool": "gap", "attention": "axial"},
    ],
)
def test_the_last_layer_gives_the_models_own_logits(changes: dict[str, object]) -> None:
    model, x = vit(**changes), images(10)
    found = logit_lens(model, x)
    assert found.logits_LBK is not None and found.logits_LBK.shape == (model.spec.num_blocks, 10, 5)
    torch.testing.assert_close(found.logits_LBK[-1], model(x).detach())
    assert not torch.allclose(found.logits_LBK[0], found.logits_LBK[-1])
    torch.testing.assert_close(found.similarity_LB[-1], torch.ones(10))


def test_an_early_layer_gives_what_a_model_that_ends_there_would() -> None:
    deep, x = vit(), images(3)
    shallow = vit(depth=2)
    shallow.load_state_dict({name: value for name, value in deep.state_dict().items() if "blocks.2." not in name})
    found = logit_lens(deep, x)
    assert found.logits_LBK is not None
    torch.testing.assert_close(found.logits_LBK[1], shallow(x).detach())


def test_a_model_without_a_head_is_compared_with_its_last_layer() -> None:
    model, x = vit(num_classes=0), images(3)
    found = logit_lens(model, x)
    assert found.logits_LBK is None
    first_B = model.features(x, layers=[0]).last
    torch.testing.assert_close(found.similarity_LB[0], torch.cosine_similarity(first_B, model(x), dim=-1).detach())
    assert found.similarity_LB[0].max() < 1


# --- running a model --------------------------------------------------------------------------------------------------


def test_a_model_in_training_is_looked_at_without_dropout_and_left_as_it_was() -> None:
    model, x = vit(dropout=0.5, stochastic_depth=0.5), images(4)
    expected = token_norms(model, x).norms_LBT
    model.train()
    model.norm.eval()
    features = layer_features(model, [x])
    torch.testing.assert_close(token_norms(model, x).norms_LBT, expected)
    assert model.training and model.blocks[0].training and not model.norm.training
    torch.testing.assert_close(features.layers[2], model.eval().features(x).last.detach())


@pytest.mark.skipif(not (REAL.is_file() and (DATA / "hymenoptera").is_dir()), reason="needs VITLAB_DATA")
@pytest.mark.slow
def test_dinov2_has_artefacts_before_its_last_block_and_finds_the_same_parts_again() -> None:
    classifier = vitlab.load(REAL, quiet=True, device="cpu")
    model = classifier.model
    assert isinstance(model, ViT)
    photos = vitlab.open_data(DATA / "hymenoptera" / "hymenoptera_val.npz")
    x_BCYX = classifier.pixels([photos[i][0] for i in range(0, 152, 19)])
    norms: TokenNorms = token_norms(model, x_BCYX)
    assert norms.layer < 11 and 1 <= sum(norms.counts) <= 40
    assert not norms.outliers_LBYX[-1].any(), "the last block lifts all patches to the same norm"
    with torch.no_grad():
        features = model.features(x_BCYX, tokens="patches")
    picked = pick_queries(features.last, features.grid, 2, exclude_BYX=norms.outliers_BYX)
    nearest = nearest_patches(features.last, features.grid, picked)
    assert all(max(match.similarity for match in matches) > 0.4 for matches in nearest.matches)
