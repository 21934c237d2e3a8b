"""A tiny member of every family, for tests of exports."""

import torch

from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.model import Model
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, TrunkSpec, ViTSpec

LABELS = ("ant", "bee", "cat", "dog", 'a "quoted" <label>\nof two lines')
_K = len(LABELS)
VIT = ViTSpec(width=32, depth=1, mlp_dim=48, heads=2, patch=8, image_size=(32, 24), num_classes=_K)
FAMILIES: dict[str, ModelSpec] = {
    "ViT": VIT,
    "DINOv2": ViTSpec(
        width=32,
        depth=1,
        mlp_dim=48,
        heads=2,
        patch=7,
        image_size=(28, 28),
        num_classes=_K,
        gelu="exact",
        layer_scale=1.0,
        registers=2,
        pos_resize="bicubic-offset",
    ),
    "MAP": ViTSpec(
        width=16,
        depth=1,
        mlp_dim=16,
        heads=2,
        patch=8,
        image_size=(16, 16),
        num_classes=_K,
        pool="map",
        head="mlp-tanh",
    ),
    "hybrid": ViTSpec(
        width=16,
        depth=1,
        mlp_dim=16,
        heads=2,
        patch=1,
        image_size=(32, 32),
        num_classes=_K,
        stem=TrunkSpec(stages=(1, 1)),
    ),
    "Axial-ViT": ViTSpec(
        width=16,
        depth=1,
        mlp_dim=16,
        heads=2,
        patch=8,
        image_size=(24, 16),
        num_classes=_K,
        attention="axial",
        pool="gap",
    ),
    "BiT": BiTSpec(trunk=TrunkSpec(stages=(1, 1), preact=True, ws="var-eps"), image_size=(32, 32), num_classes=_K),
    "BiT+NL": BiTSpec(
        trunk=TrunkSpec(stages=(1, 2), preact=True, padding="fixed", non_local=(1,)),
        image_size=(32, 32),
        num_classes=_K,
    ),
    "AxialResNet": AxialResNetSpec(stages=(1, 1), width=8, heads=2, image_size=(32, 32), num_classes=_K),
    "EfficientNet": EfficientNetSpec(
        stem_width=8, widths=(8,) * 7, depths=(1,) * 7, last_width=16, image_size=(32, 32), num_classes=_K
    ),
}


def with_scores(model: Model, seed: int = 0) -> Model:
    """What starts at zero, the head and the ends of branches, would hide faults in what it multiplies."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2, generator=generator)
    return model.eval()
