"""Masked patch prediction, the paper's own pre-training without labels (section 4.6, B.1.2).

Some patch embeddings are corrupted after E and before the positions: 80 % become a learned vector, 10 % the embedding of
another patch of the image, 10 % stay. From each corrupted patch's last token it is predicted what the patch showed.
Letters: B batch, C channels, Y X rows and columns, N patches, M corrupted ones, D width, O outputs, P patch side.
"""

from typing import NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.data.rules import Preprocess
from vitlab.models.ops import gather_tokens, random_order
from vitlab.models.spec import Pair
from vitlab.models.vit import ViT
from vitlab.training.pretext.task import TOKEN_STD, Pretext, TaskLinear, hide_and_paint, patch_pixels
from vitlab.training.pretext_rules import CELLS, LEVELS, num_corrupted, num_outputs
from vitlab.training.rules import MaskedRule

_MASKED, _SWAPPED = 0.8, 0.1  # of the corrupted patches; the rest stay, so that every token has to tell
_STEP = 256 / LEVELS  # grey levels of one of them
_ROUNDING = 1e-5  # of float32 in means of bytes, which are multiples of more than this


class Corruption(NamedTuple):
    """Which patches are corrupted, and how."""

    index_BM: Tensor  # numbers of the patches
    fate_BM: Tensor  # uniform in 0 to 1: see `corrupt`
    other_BM: Tensor  # the patch that takes the place of those that are swapped, never the same


def draw_corruption(x_BND: Tensor, share: float) -> Corruption:
    """As many of every image's patches as `share` says, rounded, and one at least."""
    patches = x_BND.shape[1]
    index_BM = random_order(x_BND)[:, : num_corrupted(patches, share)]
    shift_BM = torch.randint(1, max(2, patches), index_BM.shape, device=x_BND.device)
    return Corruption(index_BM, torch.rand(index_BM.shape, device=x_BND.device), (index_BM + shift_BM) % patches)


def corrupt(x_BND: Tensor, mask_D: Tensor, drawn: Corruption) -> Tensor:
    """The embeddings after corruption."""
    fate_BM1 = drawn.fate_BM[:, :, None]
    kept_BMD, other_BMD = gather_tokens(x_BND, drawn.index_BM), gather_tokens(x_BND, drawn.other_BM)
    new_BMD = torch.where(fate_BM1 < _MASKED + _SWAPPED, other_BMD, kept_BMD)
    new_BMD = torch.where(fate_BM1 < _MASKED, mask_D.to(x_BND.dtype), new_BMD)
    return x_BND.scatter(1, drawn.index_BM[:, :, None].expand_as(new_BMD), new_BMD)


class MaskedPatches(Pretext):
    """The encoder, the mask vector and a linear layer for the prediction."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, encoder: ViT, rule: MaskedRule, preprocess: Preprocess) -> None:
        super().__init__(encoder)
        self.rule, self.outputs = rule, num_outputs(rule, encoder.spec)
        self.mask = nn.Parameter(torch.empty(encoder.spec.width))
        self.head = TaskLinear(encoder.spec.width, self.outputs)
        for name in ("mean", "std"):
            self.register_buffer(
                f"{name}_C11", torch.tensor(getattr(preprocess, name))[:, None, None], persistent=False
            )

    @torch.no_grad()
    def init_tokens(self, generator: Generator) -> None:
        nn.init.normal_(self.mask, std=TOKEN_STD, generator=generator)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        predicted_BMO, index_BM, _ = self._predict(x_BCYX)
        return masked_losses(self.rule, predicted_BMO, self.targets(x_BCYX), index_BM)

    def paint(self, x_BCYX: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest colours; of a mean colour, the whole patch has it."""
        predicted_BMO, index_BM, grid = self._predict(x_BCYX)
        patch = self.encoder.spec.patch
        if self.rule.target != "pixels":
            predicted_BMO = self._colours(predicted_BMO, x_BCYX.shape[1], patch)
        return hide_and_paint(x_BCYX, predicted_BMO, index_BM, patch, grid)

    def _predict(self, x_BCYX: Tensor) -> tuple[Tensor, Tensor, Pair]:
        """Predictions for the corrupted patches [B, M, O], their numbers [B, M], and the grid."""
        patches_BND, grid = self.encoder.embed_patches(x_BCYX)
        drawn = draw_corruption(patches_BND, self.rule.corrupt)
        z_BTD = self.encoder.encode_patches(corrupt(patches_BND, self.mask, drawn), grid)
        tokens_BND = self.encoder.norm(z_BTD)[:, self.encoder.spec.num_prefix :]
        return self.head(gather_tokens(tokens_BND, drawn.index_BM)), drawn.index_BM, grid

    def _colours(self, logits_BMO: Tensor, channels: int, patch: int) -> Tensor:
        """Pixels of patches [B, M, P·P·C], normalised, of the likeliest class in each cell: the middle of its levels."""
        cells = 1 if self.rule.target == "colour" else CELLS
        classes = logits_BMO.unflatten(2, (cells * cells, -1)).argmax(dim=3)  # [B, M, cells²]
        levels = torch.stack([classes // LEVELS**place % LEVELS for place in reversed(range(channels))], dim=2)
        bytes_BMCcells = ((levels + 0.5) * _STEP).unflatten(3, (cells, cells))
        pixels = F.interpolate(bytes_BMCcells.flatten(0, 1), (patch, patch), mode="nearest-exact")
        normal = (pixels / 255 - self.mean_C11) / self.std_C11
        return normal.permute(0, 2, 3, 1).flatten(1).unflatten(0, logits_BMO.shape[:2])

    def targets(self, x_BCYX: Tensor) -> Tensor:
        """What each patch shows, [B, N, ...], of normalised images: classes of colours, or pixels."""
        patch = self.encoder.spec.patch
        if self.rule.target == "pixels":
            return patch_pixels(x_BCYX, patch)
        bytes_BCYX = (
            (x_BCYX * self.std_C11 + self.mean_C11) * 255
        ).round()  # bytes were normalised, and come back exactly
        return colour_classes(bytes_BCYX, patch, 1 if self.rule.target == "colour" else CELLS)


def colour_classes(bytes_BCYX: Tensor, patch: int, cells: int) -> Tensor:
    """The class of the mean colour of each cell, int64 [B, N, cells²]: 64·⌊R/32⌋ + 8·⌊G/32⌋ + ⌊B/32⌋, or ⌊grey/32⌋."""
    batch, channels = bytes_BCYX.shape[:2]
    pixels_BNPPC = patch_pixels(bytes_BCYX, patch).unflatten(2, (patch, patch, channels))
    images = pixels_BNPPC.flatten(0, 1).permute(0, 3, 1, 2)
    means = F.adaptive_avg_pool2d(images, cells).flatten(2)  # [B·N, C, cells²]
    levels = (means / _STEP + _ROUNDING).floor().long().clamp(0, LEVELS - 1)
    classes = sum(levels[:, c] * LEVELS ** (channels - 1 - c) for c in range(channels))
    assert isinstance(classes, Tensor)
    return classes.unflatten(0, (batch, -1))


def masked_losses(rule: MaskedRule, predicted_BMO: Tensor, targets: Tensor, index_BM: Tensor) -> Tensor:
    """The mean over the corrupted patches of each image; the targets of the others are not looked at. [B]"""
    wanted = gather_tokens(targets, index_BM)
    match rule.target:
        case "colour" | "downsampled":
            logits = predicted_BMO.float().unflatten(2, (wanted.shape[2], -1))
            return (
                F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view(len(wanted), -1).mean(1)
            )
        case "pixels":
            return (predicted_BMO.float() - wanted).square().flatten(1).mean(dim=1)
        case _:
            assert_never(rule.target)
