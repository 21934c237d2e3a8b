"""Filters beside NumPy's SVD, and positions that are alike where they ought to be."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.core.errors import UsageError
from vitlab.inspection.embeddings import patch_filters, position_similarity
from vitlab.models.build import build, create_model
from vitlab.models.ops import STANDARDISATIONS
from vitlab.models.resnet import BiT
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.models.vit import Block, ViT

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))
REAL = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"


def vit(**changes: object) -> ViT:
    fields = {"width": 32, "depth": 3, "mlp_dim": 64, "heads": 2, "patch": 4, "image_size": (16, 24), "num_classes": 5}
    model = build(ViTSpec(**(fields | changes)), seed=0)  # type: ignore[arg-type]
    assert isinstance(model, ViT)
    return model


def numpy_components(filters_DF: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    rows = filters_DF.detach().double().numpy()
    _, singular, vectors = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    return vectors, singular**2 / (singular**2).sum()


@pytest.mark.parametrize("width", [32, 64])  # fewer filters than the 48 numbers of each, and more
def test_filters_equal_numpys_svd_up_to_sign(width: int) -> None:
    model = vit(width=width)
    found = patch_filters(model, 28)
    vectors, shares = numpy_components(model.embed.weight.flatten(1))
    assert found.components_KCPP.shape == (28, 3, 4, 4) and found.source == "patch embedding"
    cosine_K = (found.components_KCPP.flatten(1).double().numpy() * vectors[:28]).sum(axis=1)
    np.testing.assert_allclose(np.abs(cosine_K), 1, atol=1e-6)
    np.testing.assert_allclose(found.explained_K.numpy(), shares[:28], rtol=1e-5)


def test_the_largest_entry_of_a_component_is_positive() -> None:
    for component_F in patch_filters(vit()).components_KCPP.flatten(1):
        assert component_F.max() == component_F.abs().max()


def test_all_components_explain_all_variance_and_more_are_refused() -> None:
    model = vit()  # 32 filters, of which centring takes one direction away
    every = patch_filters(model, None)
    assert every.rank == len(every.components_KCPP) == 31
    assert every.explained_K.sum().item() == pytest.approx(1)
    assert len(patch_filters(model, 31).components_KCPP) == 31
    for wrong in (0, 32):
        with pytest.raises(UsageError, match=f"31 principal components, so {wrong} "):
            patch_filters(model, wrong)


def test_equal_filters_have_no_components() -> None:
    model = vit()
    with torch.no_grad():
        model.embed.weight[:] = model.embed.weight[:1].clone()
    with pytest.raises(UsageError, match="all the same"):
        patch_filters(model)


def test_a_hybrid_shows_the_first_convolution_of_its_stem_as_it_is_applied() -> None:
    model = vit(stem=TrunkSpec(stages=(1, 1)), patch=1, image_size=(32, 32))
    assert model.stem is not None
    found = patch_filters(model)
    assert found.source == "stem's first convolution" and found.components_KCPP.shape == (28, 3, 7, 7)
    trunk = model.stem.trunk
    vectors, _ = numpy_components(STANDARDISATIONS[trunk.ws](model.stem.root.weight, trunk.ws_eps).flatten(1))
    cosine_K = (found.components_KCPP.flatten(1).double().numpy() * vectors[:28]).sum(axis=1)
    np.testing.assert_allclose(np.abs(cosine_K), 1, atol=1e-6)


def test_a_bit_shows_its_first_convolution() -> None:
    model = build(BiTSpec(trunk=bit_trunk((1,), 1), image_size=(32, 32)), seed=0)
    assert isinstance(model, BiT)
    assert patch_filters(model).source == "first convolution"


@pytest.mark.parametrize(("name", "count"), [("EfficientNet-B0", 32), ("AxialResNet-26-w8", 8), ("BiT-R26x1", 64)])
def test_few_filters_of_a_cnn_are_there_themselves(name: str, count: int) -> None:
    short = {"trunk": {"stages": [1]}}  # nothing behind the first convolution matters
    model = create_model(name, image_size=32, num_classes=3, seed=0, overrides=short if name.startswith("BiT") else {})
    found, side = patch_filters(model, None), 3 if name.startswith("Efficient") else 7
    assert found.source == "first convolution" and found.components_KCPP.shape[1:] == (3, side, side)
    assert found.filters_DCPP is not None and found.filters_DCPP.shape == (count, 3, side, side)
    if isinstance(model, BiT):  # as they are applied: standardised
        torch.testing.assert_close(found.filters_DCPP.mean(dim=(1, 2, 3)), torch.zeros(64), rtol=0, atol=1e-6)
        assert (
            patch_filters(create_model("BiT-R26x2", image_size=32, num_classes=3, overrides=short)).filters_DCPP is None
        )
    assert patch_filters(vit()).filters_DCPP is None


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"pos": "learned"},
        {"pos": "learned", "cls_in_pos": False, "registers": 2},
        {"pos": "learned", "pool": "gap", "attention": "axial"},
        {"pos": "learned2d"},
        {"pos": "learned2d", "pos_at": "shared"},
        {"pos": "sincos2d"},
        {"pos": "relative"},
        {"pos": "relative", "registers": 1},
    ],
)
def test_every_kind_of_position_is_like_itself(changes: dict[str, object]) -> None:
    found = position_similarity(vit(**changes))
    assert found.kind == changes["pos"] and found.note and found.tables == 1
    assert found.similarity_YXYX.shape == (4, 6, 4, 6)
    flat_NN = found.similarity_YXYX.reshape(24, 24)
    torch.testing.assert_close(flat_NN.diagonal(), torch.ones(24))
    assert flat_NN.abs().max() <= 1 + 1e-6 and (flat_NN - torch.eye(24)).abs().max() < 1


def test_similarity_is_the_cosine_of_the_patches_rows_of_the_table() -> None:
    model = vit()
    assert model.pos.table is not None
    first, second = model.pos.table[0, 1 + 2 * 6 + 5], model.pos.table[0, 1 + 1 * 6 + 0]  # slot 0 is the class token's
    cosine = torch.cosine_similarity(first, second, dim=0)
    torch.testing.assert_close(position_similarity(model).similarity_YXYX[2, 5, 1, 0], cosine.detach())


def test_a_block_with_a_table_of_its_own_is_chosen_by_number() -> None:
    model = vit(pos_at="every")
    assert model.pos.table is not None
    unit_ND = torch.nn.functional.normalize(model.pos.table[2, 1:].detach(), dim=1)
    expected_YXYX = (unit_ND @ unit_ND.T).reshape(4, 6, 4, 6)
    for table in (2, -1):
        found = position_similarity(model, table)
        torch.testing.assert_close(found.similarity_YXYX, expected_YXYX)
        assert found.tables == 3 and "before layer 3 of 3" in found.note
    with pytest.raises(UsageError, match="3 position tables, 0 to 2"):
        position_similarity(model, 3)


def test_relative_positions_compare_the_vector_for_a_patch_with_the_vector_for_itself() -> None:
    model = vit(pos="relative")
    similarity_NN = position_similarity(model).similarity_YXYX.reshape(24, 24)
    for i, j in ((0, 5), (7, 3), (23, 0)):
        cosines: list[float] = []
        for block in model.blocks:
            assert isinstance(block, Block) and block.attn.relative is not None
            table, zero = block.attn.relative.detach(), 24  # 25 tokens: offsets -24 to 24
            cosines.append(torch.cosine_similarity(table[zero + i - j], table[zero], dim=0).item())
        assert similarity_NN[i, j].item() == pytest.approx(sum(cosines) / 3, abs=1e-6)
    with pytest.raises(UsageError, match="one position table"):
        position_similarity(model, 1)


def test_model_without_positions_is_reported() -> None:
    with pytest.raises(UsageError, match="no positions to compare"):
        position_similarity(vit(pos="none"))


@pytest.mark.skipif(not REAL.is_file(), reason="needs dinov2_vits14 in VITLAB_DATA")
def test_neighbours_in_a_real_model_are_more_alike_than_distant_patches() -> None:
    model = vitlab.load(REAL, quiet=True, device="cpu").model
    assert isinstance(model, ViT)
    similarity_YXYX = position_similarity(model).similarity_YXYX
    for row, col in ((18, 18), (5, 30), (30, 5)):
        beside = min(similarity_YXYX[row, col, row + y, col + x] for y, x in ((0, 1), (1, 0), (0, -1), (-1, 0)))
        far = similarity_YXYX[row, col, (row + 18) % 37, (col + 18) % 37]
        assert beside > 0.7 and far < 0.3
