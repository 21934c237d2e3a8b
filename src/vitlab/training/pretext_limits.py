"""What an objective without labels cannot be combined with: each refused in a sentence, before anything is read."""

from typing import TYPE_CHECKING

from vitlab.core.errors import UsageError, require
from vitlab.models.spec import ViTSpec

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe

CELLS = 4  # rows and columns of the down-sized patch that masked patch prediction can predict
_COLOURS = 3  # channels that a class of colours can have: 8 levels each make 512


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
