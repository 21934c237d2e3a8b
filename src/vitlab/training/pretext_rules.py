"""Pretext tasks before they are built: what they cannot be combined with, their sizes and their cost. Loads no torch."""

from typing import TYPE_CHECKING, assert_never

from vitlab.core.errors import UsageError, require
from vitlab.models.cost import count_macs
from vitlab.models.spec import ModelSpec, ViTSpec
from vitlab.training.rules import MaeRule, MaskedRule, Objective

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe

CELLS = 4  # rows and columns of the down-sized patch that masked patch prediction can predict
LEVELS = 8  # of a colour there: 3 bits
_COLOURS = 3  # channels that a class of colours can have: 8 levels each make 512
_MLP_RATIO = 4  # of a decoder's blocks, as of all ViTs


def require_pretext(recipe: "Recipe") -> None:
    """An error for a recipe whose objective has no labels and whose other settings want some, or another model."""
    kind, data = recipe.objective.kind, recipe.data
    name = f"objective.kind={kind}"
    mixes = data.mix.mixup or data.mix.cutmix
    require(not mixes, f"{name} has no labels to mix", "Set data.mix.mixup=0 and data.mix.cutmix=0.")
    require(not data.balanced, f"{name} has no classes to balance", "Set data.balanced=false.")
    require(not data.min_images, f"{name} has no classes to drop", "Leave data.min_images out.")
    require(recipe.train.method == "steps", f"{name} needs train.method=steps: a linear probe has labels")
    trained = recipe.optim.train
    require(trained == "full", f"{name} trains the whole encoder, so optim.train={trained} is not available")
    require(not recipe.head_bias, f"{name} leaves an encoder without a head, so there is no head_bias")
    if not isinstance(recipe.model, ViTSpec):
        raise UsageError(f"{name} needs a Vision Transformer", hint="Choose a model such as ViT-S/16.")
    require(not recipe.model.patch_dropout, f"{name} excludes patch dropout", "Set model.patch_dropout=0.")
    if kind != "feature-distillation":
        _require_patches(recipe.model, name)
    if recipe.objective.masked is not None:
        _require_target(recipe.model, recipe.objective.masked.target)
    if kind == "mae":
        plain = recipe.model.attention == "full" and recipe.model.pos != "relative" and recipe.model.pos_at == "stem"
        require(
            plain,
            f"{name} runs the encoder on some patches alone, for which axial attention, relative positions and positions "
            "of later blocks have no place",
            "Choose model.attention=full, model.pos=learned or sincos2d, and model.pos_at=stem.",
        )


def _require_patches(spec: ViTSpec, name: str) -> None:
    """Patches must be the only way in, and all parameters must take part: several processes wait for every gradient."""
    rows, cols = spec.grid
    require(rows * cols > 1, f"{name} needs more than one patch in an image", "Choose a smaller patch.")
    require(spec.stem is None, f"{name} hides patches, which a ResNet stem would see through", "Choose a plain ViT.")
    unused = "model.pool=map" if spec.pool == "map" else "model.head=mlp-tanh" if spec.head == "mlp-tanh" else ""
    require(not unused, f"{name} trains the tokens, and {unused} comes behind them", "Use model.pool=cls or gap.")


def _require_target(spec: ViTSpec, target: str) -> None:
    name = f"objective.masked.target={target}"
    if target != "pixels":
        what = f"{name} is for grey or RGB images, not for {spec.in_channels} channels"
        require(spec.in_channels <= _COLOURS, what, "Use objective.masked.target=pixels.")
    if target == "downsampled":
        what = f"{name} needs patches of {CELLS} pixels or more, not {spec.patch}"
        require(spec.patch >= CELLS, what, "Use objective.masked.target=colour or pixels.")


# --- sizes ------------------------------------------------------------------------------------------------------------


def num_corrupted(patches: int, share: float) -> int:
    """How many patches of an image masked patch prediction corrupts: one at least."""
    return max(1, round(share * patches))


def num_outputs(rule: MaskedRule, spec: ViTSpec) -> int:
    """How many numbers masked patch prediction predicts for a patch."""
    match rule.target:
        case "colour":
            return LEVELS**spec.in_channels
        case "downsampled":
            return CELLS**2 * LEVELS**spec.in_channels
        case "pixels":
            return spec.patch**2 * spec.in_channels
        case _:
            assert_never(rule.target)


def num_seen(patches: int, masked: float) -> int:
    """How many patches the encoder of a masked autoencoder sees: one at least, and one is left to paint."""
    return min(max(1, round((1 - masked) * patches)), patches - 1)


def decoder_spec(encoder: ViTSpec, rule: MaeRule) -> ViTSpec:
    """The decoder of a masked autoencoder as a ViT."""
    width = rule.decoder_width
    return ViTSpec(
        width=width,
        depth=rule.decoder_depth,
        mlp_dim=_MLP_RATIO * width,
        heads=rule.decoder_heads,
        patch=encoder.patch,
        image_size=encoder.image_size,
        in_channels=encoder.in_channels,
        num_classes=0,
        pool="gap",
        pos="sincos2d",
        gelu=encoder.gelu,
        norm_eps=encoder.norm_eps,
    )


def count_task_macs(objective: Objective, spec: ModelSpec) -> int:
    """Multiply-adds of one image, forward, of all that is trained. A teacher's own come on top, and are not counted."""
    if not isinstance(spec, ViTSpec):
        return count_macs(spec, padding_taps=False)
    patches, pixels = spec.grid[0] * spec.grid[1], spec.patch**2 * spec.in_channels
    if not objective.is_pretext:
        dropped = spec.num_tokens - (kept := spec.num_prefix + spec.num_kept(patches))
        saved = _count_blocks(spec, spec.num_tokens) - _count_blocks(spec, kept) if dropped else 0
        if spec.pool == "map":  # keys, values and the attention of its one query
            saved += dropped * 2 * spec.width * (spec.width + 1)
        return count_macs(spec, padding_taps=False) - saved
    if objective.masked is not None:
        predicted = num_corrupted(patches, objective.masked.corrupt) * num_outputs(objective.masked, spec)
        return count_macs(spec) + predicted * spec.width
    if objective.mae is not None:
        decoder, tokens = decoder_spec(spec, objective.mae), num_seen(patches, objective.mae.mask) + spec.num_prefix
        ends = patches * pixels * (spec.width + decoder.width) + tokens * spec.width * decoder.width
        return ends + _count_blocks(spec, tokens) + _count_blocks(decoder, patches + spec.num_prefix)
    return count_macs(spec, padding_taps=False)


def _count_blocks(spec: ViTSpec, tokens: int) -> int:
    """Multiply-adds of all blocks, of full attention, on so many tokens."""
    return spec.depth * tokens * (4 * spec.width**2 + 2 * spec.width * spec.mlp_dim + 2 * tokens * spec.width)
