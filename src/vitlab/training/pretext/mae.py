"""A masked autoencoder (He et al. 2022): the encoder sees a quarter of the patches, and a small decoder paints the others.

Positions are added before patches are hidden, so that each token knows where it is. The decoder gets the encoder's tokens, a
learned vector for each hidden patch and fixed positions of its own; only hidden patches count in the loss.
Letters: B batch, C channels, Y X rows and columns, N patches, M hidden ones, T tokens, D width, O numbers of a patch.
"""

import torch
from torch import Generator, Tensor, nn

from vitlab.models import ops
from vitlab.models.ops import gather_tokens, random_order
from vitlab.models.spec import Pair
from vitlab.models.vit import Block, ViT
from vitlab.training.pretext.task import TOKEN_STD, Pretext, TaskLinear, hide_and_paint, patch_pixels
from vitlab.training.pretext_rules import decoder_spec, num_seen
from vitlab.training.rules import MaeRule

_TARGET_EPS = 1e-6  # the authors'


class MaskedAutoencoder(Pretext):
    """The encoder, and the decoder that goes when it is trained."""

    def __init__(self, encoder: ViT, rule: MaeRule) -> None:
        super().__init__(encoder)
        spec = decoder_spec(encoder.spec, rule)
        self.rule, self.decoder_spec = rule, spec
        self.embed = TaskLinear(encoder.spec.width, spec.width)
        self.mask = nn.Parameter(torch.empty(spec.width))
        self.blocks = nn.ModuleList(Block(spec, i) for i in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.head = TaskLinear(spec.width, spec.patch**2 * spec.in_channels)

    @torch.no_grad()
    def init_tokens(self, generator: Generator) -> None:
        nn.init.normal_(self.mask, std=TOKEN_STD, generator=generator)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        predicted_BNO, hidden_BM, _ = self._predict(x_BCYX)
        targets_BNO = pixel_targets(x_BCYX, self.encoder.spec.patch, normed=self.rule.norm_targets)
        return hidden_losses(predicted_BNO, targets_BNO, hidden_BM)

    def paint(self, x_BCYX: Tensor) -> tuple[Tensor, Tensor]:
        """As in the authors' figures: what normalised targets lack, each patch's mean and variance, is the true one's."""
        predicted_BNO, hidden_BM, grid = self._predict(x_BCYX)
        patch = self.encoder.spec.patch
        if self.rule.norm_targets:
            pixels_BNO = patch_pixels(x_BCYX, patch)
            spread_BN1 = (pixels_BNO.var(dim=2, keepdim=True) + _TARGET_EPS).sqrt()
            predicted_BNO = predicted_BNO.float() * spread_BN1 + pixels_BNO.mean(dim=2, keepdim=True)
        return hide_and_paint(x_BCYX, gather_tokens(predicted_BNO, hidden_BM), hidden_BM, patch, grid)

    def _predict(self, x_BCYX: Tensor) -> tuple[Tensor, Tensor, Pair]:
        """Predictions for all patches [B, N, O], the numbers of the hidden ones [B, M], and the grid."""
        patches_BND, grid = self.encoder.embed_patches(x_BCYX)
        order_BN = random_order(patches_BND)
        seen = num_seen(patches_BND.shape[1], self.rule.mask)
        z_BTD = self.encoder.encode_patches(patches_BND, grid, kept_index_BN=order_BN[:, :seen])
        predicted_BNO = self.head(self.decode(self.embed(self.encoder.norm(z_BTD)), order_BN, grid))
        return predicted_BNO, order_BN[:, seen:], grid

    def decode(self, z_BTD: Tensor, order_BN: Tensor, grid: Pair) -> Tensor:
        """The decoder's token of every patch, in the order of the image."""
        prefix = self.encoder.spec.num_prefix
        patches_BND = restore(z_BTD[:, prefix:], self.mask.to(z_BTD.dtype), order_BN)
        pos_1ND = ops.sincos2d(grid, self.decoder_spec.width, z_BTD.device).to(z_BTD.dtype)
        y_BTD = torch.cat([z_BTD[:, :prefix], patches_BND + pos_1ND], dim=1)
        for block in self.blocks:
            y_BTD = block(y_BTD, grid)
        return self.norm(y_BTD)[:, prefix:]


def restore(seen_BND: Tensor, mask_D: Tensor, order_BN: Tensor) -> Tensor:
    """Tokens of the first patches in `order_BN`, and the mask vector for all others, each back in its place."""
    hidden = order_BN.shape[1] - seen_BND.shape[1]
    all_BND = torch.cat([seen_BND, mask_D.expand(len(seen_BND), hidden, -1)], dim=1)
    return gather_tokens(all_BND, order_BN.argsort(dim=1))


def pixel_targets(x_BCYX: Tensor, patch: int, *, normed: bool) -> Tensor:
    """The pixels of every patch, [B, N, O]; `normed`, each patch by its own mean and variance."""
    pixels_BNO = patch_pixels(x_BCYX, patch)
    if not normed:
        return pixels_BNO
    centred_BNO = pixels_BNO - pixels_BNO.mean(dim=2, keepdim=True)
    return centred_BNO / (pixels_BNO.var(dim=2, keepdim=True) + _TARGET_EPS).sqrt()


def hidden_losses(predicted_BNO: Tensor, targets_BNO: Tensor, hidden_BM: Tensor) -> Tensor:
    """The mean squared error over the hidden patches of each image, [B]."""
    errors_BN = (predicted_BNO.float() - targets_BNO).square().mean(dim=2)
    return errors_BN.gather(1, hidden_BM).mean(dim=1)
