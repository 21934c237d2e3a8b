"""Distillation of features: a student learns to say of an image, and of each patch, what a frozen teacher says.

    loss = 1 - cos(p(student), teacher) of the image + weight · mean over patches (1 - cos(q(student), teacher))

p and q are projections to the teacher's width. Teacher and student may differ in patch, size and normalisation.
Letters: B batch, C channels, Y X rows and columns, N patches, T tokens, D width.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.data.rules import Preprocess
from vitlab.models import ops
from vitlab.models.spec import Pair, ViTSpec
from vitlab.models.vit import ViT
from vitlab.training.pretext.task import Pretext, Projection
from vitlab.training.rules import FeaturesRule
from vitlab.weights.surgery import on_image_size


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Frozen weights, with the images that they want. Not a module: nobody is to train, store or move it by accident."""

    model: ViT
    preprocess: Preprocess

    @torch.no_grad()
    def tokens(self, x_BCYX: Tensor, grid: Pair) -> tuple[Tensor, Tensor]:
        """The image's vector [B, D] and those of the patches on `grid`, [B, N, D], of images in the teacher's own range."""
        size = self.model.spec.image_size
        if (x_BCYX.shape[2], x_BCYX.shape[3]) != size:
            how = "bicubic" if self.preprocess.filter == "bicubic" else "bilinear"
            x_BCYX = F.interpolate(x_BCYX, size, mode=how, antialias=True)
        z_BTD = self.model.encode_patches(*self.model.embed_patches(x_BCYX))
        patches_BND = self.model.norm(z_BTD)[:, self.model.spec.num_prefix :]
        if self.model.spec.grid != grid:
            patches_BND = ops.resize_grid(patches_BND.float(), self.model.spec.grid, grid, "bilinear")
        return self.model.represent_tokens(z_BTD), patches_BND


def teacher_for(model: nn.Module, preprocess: Preprocess, student: ViTSpec, name: str) -> Teacher:
    """The teacher at the image size that gives it the student's grid of patches; at its own, where none does."""
    if not isinstance(model, ViT):
        raise UsageError(f"the teacher {name} must be a Vision Transformer, to have a vector for each patch")
    if model.spec.in_channels != student.in_channels:
        raise UsageError(
            f"the teacher {name} sees images of {model.spec.in_channels} channels, the student of {student.in_channels}",
            hint="Give data.mode and model as the teacher's.",
        )
    rows, cols = student.grid
    size = (rows * model.spec.stride, cols * model.spec.stride)
    try:
        model.spec.require_resizable(size)
        fits = model.spec.grid_for(size) == student.grid
    except UsageError:
        fits = False
    # Resized once, not on every step.
    model = on_image_size(model, size) if fits and size != model.spec.image_size else model
    return Teacher(model.requires_grad_(False).eval(), preprocess)


class FeatureDistillation(Pretext):
    """The student with its projections, and the teacher beside them."""

    scale_C11: Tensor
    shift_C11: Tensor

    def __init__(self, encoder: ViT, rule: FeaturesRule, teacher: Teacher, preprocess: Preprocess) -> None:
        """`preprocess` is the student's."""
        super().__init__(encoder)
        self.rule = rule
        self.teacher = teacher  # no module to torch: it is in no state, no optimiser and no gradient
        width, out = encoder.spec.width, teacher.model.spec.width
        hidden = {"linear": False, "mlp": True}[rule.projection]
        self.image = Projection(width, out, hidden=hidden)
        self.patches = Projection(width, out, hidden=hidden) if rule.patch_weight else None
        ours, theirs = (torch.tensor((rule.mean, rule.std)) for rule in (preprocess, teacher.preprocess))
        # x·std + mean are the pixels again, which the teacher's mean and std make its own input.
        self.register_buffer("scale_C11", (ours[1] / theirs[1])[:, None, None], persistent=False)
        self.register_buffer("shift_C11", ((ours[0] - theirs[0]) / theirs[1])[:, None, None], persistent=False)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        patches_BND, grid = self.encoder.embed_patches(x_BCYX)
        z_BTD = self.encoder.encode_patches(patches_BND, grid)
        wanted_BD, wanted_BND = self.teacher.tokens(x_BCYX * self.scale_C11 + self.shift_C11, grid)
        losses_B = _distance(self.image(self.encoder.represent_tokens(z_BTD)), wanted_BD)
        if self.patches is None:
            return losses_B
        tokens_BND = self.encoder.norm(z_BTD)[:, self.encoder.spec.num_prefix :]
        return losses_B + self.rule.patch_weight * _distance(self.patches(tokens_BND), wanted_BND).mean(dim=1)


def _distance(x: Tensor, wanted: Tensor) -> Tensor:
    """1 - cosine along the last axis."""
    return 1 - F.cosine_similarity(x.float(), wanted.float(), dim=-1)
