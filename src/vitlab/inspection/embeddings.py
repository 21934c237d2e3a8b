"""Similarity of position embeddings, as in Figure 7 (centre)."""

import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.vit import ViT


def position_similarity(model: ViT) -> Tensor:
    """Cosine between the positions of every two patches, [Y, X, Y, X]."""
    _, patches_LND = model.pos(model.spec.grid, model.embed.weight)
    if patches_LND is None:
        raise UsageError(f"a model with pos={model.spec.pos} has no position table to compare")
    unit_ND = F.normalize(patches_LND[0].detach().float(), dim=1)
    return (unit_ND @ unit_ND.T).reshape(*model.spec.grid, *model.spec.grid)
