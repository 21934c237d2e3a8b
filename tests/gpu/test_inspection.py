"""What is seen inside a model on a GPU: the answers of the CPU. Skipped without one."""

import copy
from collections.abc import Iterator

import pytest
import torch

from vitlab.inspection.embeddings import patch_filters, position_similarity
from vitlab.inspection.representations import (
    cka,
    layer_features,
    logit_lens,
    nearest_patches,
    patch_pca,
    pick_queries,
    token_norms,
)
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.models.vit import ViT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True, params=[False, True], ids=["free", "deterministic"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def pair(**changes: object) -> tuple[ViT, ViT]:
    """The same model on the CPU and on the GPU."""
    fields = {"width": 64, "depth": 3, "mlp_dim": 128, "heads": 2, "patch": 4, "image_size": (32, 32), "num_classes": 9}
    model = build(ViTSpec(**(fields | changes)), seed=0)  # type: ignore[arg-type]
    assert isinstance(model, ViT) and model.head is not None
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval(), copy.deepcopy(model).cuda()


def images() -> torch.Tensor:
    return torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def same(there: torch.Tensor, here: torch.Tensor, atol: float = 1e-4) -> None:
    assert there.device.type == "cuda"
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("pos", ["learned", "learned2d", "sincos2d", "relative"])
def test_filters_and_positions(pos: str) -> None:
    cpu, gpu = pair(pos=pos)
    same(patch_filters(gpu, 10).components_KCPP, patch_filters(cpu, 10).components_KCPP)
    same(position_similarity(gpu).similarity_YXYX, position_similarity(cpu).similarity_YXYX)


def test_images_are_taken_from_the_cpu_to_the_model() -> None:
    (cpu, gpu), x = pair(), images()
    here, there = token_norms(cpu, x), token_norms(gpu, x)
    same(there.norms_LBT, here.norms_LBT)
    same(there.thresholds_L, here.thresholds_L)
    assert there.places == here.places
    on_cpu, on_gpu = logit_lens(cpu, x), logit_lens(gpu, x)
    assert on_cpu.logits_LBK is not None and on_gpu.logits_LBK is not None
    same(on_gpu.logits_LBK, on_cpu.logits_LBK, atol=1e-3)
    torch.testing.assert_close(cka(layer_features(gpu, [x])), cka(layer_features(cpu, [x])), rtol=0, atol=1e-4)


def test_patch_features() -> None:
    features_BND = torch.randn(5, 64, 20, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.5, 20)
    here, there = (patch_pca(x, (8, 8)) for x in (features_BND, features_BND.cuda()))
    same(there.colours_BYX3, here.colours_BYX3)
    queries = pick_queries(features_BND, (8, 8))
    assert pick_queries(features_BND.cuda(), (8, 8)) == queries
    near, also = (nearest_patches(x, (8, 8), queries, top=2) for x in (features_BND, features_BND.cuda()))
    same(also.similarity_QBYX, near.similarity_QBYX)
    assert [[m.patch for m in row] for row in also.matches] == [[m.patch for m in row] for row in near.matches]
