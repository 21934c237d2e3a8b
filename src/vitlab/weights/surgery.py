"""Changes to trained weights that keep their meaning: what a transfer needs.

Owns the paper's section 3.2: drop the pre-training head, attach a zero-initialised one, carry the positions to a new grid.
"""

import dataclasses

import torch

from vitlab.core.errors import UsageError
from vitlab.models.build import build
from vitlab.models.spec import ModelSpec, ViTSpec
from vitlab.models.vit import ViT

_HEAD = ("head.", "pre_logits.")
_MAY_DIFFER = ("image_size", "num_classes", "head", "dropout", "attention_dropout", "stochastic_depth", "pos_resize")


@dataclasses.dataclass(frozen=True)
class TransferReport:
    """What happened to each tensor of the old model, for the one line a person reads."""

    kept: int
    resized: str | None
    dropped: tuple[str, ...]
    classes: str

    def __str__(self) -> str:
        grid = f"; grid {self.resized}" if self.resized else ""
        return f"{self.kept} tensors kept; {' and '.join(self.dropped)} replaced by a zero head, {self.classes}{grid}"


def require_same_body(old: ModelSpec, new: ModelSpec) -> None:
    """An error when weights of `old` cannot start a model of `new`; known from the specs alone, before any work."""
    if not isinstance(old, ViTSpec) or not isinstance(new, ViTSpec):
        raise UsageError("transfer is built for Vision Transformers so far, not for BiT ResNets")
    for field in dataclasses.fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name not in _MAY_DIFFER and before != after:
            raise UsageError(f"the start weights have model.{field.name} = {before}, but the recipe says {after}")
    if old.grid != new.grid and old.pos == "relative":
        raise UsageError("relative positions cannot be carried to another grid")


def for_transfer(model: ViT, spec: ViTSpec) -> tuple[ViT, TransferReport]:
    """A new model for the next task: the old body, a zero-initialised linear head, positions on the new grid.

    `spec` may differ from the old one in image size, classes and regularisation; the body must be the same.
    """
    old = model.spec
    require_same_body(old, spec)
    target = build(dataclasses.replace(spec, head="linear"))
    assert isinstance(target, ViT)
    source = {
        **model.state_dict(),
        **{f"pos.{key}": value for key, value in model.pos.carried(spec.grid, spec.pos_resize).items()},
    }
    kept = {name: tensor for name, tensor in target.state_dict().items() if not name.startswith(_HEAD)}
    with torch.no_grad():
        for name, tensor in kept.items():
            tensor.copy_(source[name])
    resized = None
    if old.grid != spec.grid and old.pos in ("learned", "learned2d"):
        resized = f"{old.grid[0]}x{old.grid[1]} -> {spec.grid[0]}x{spec.grid[1]}, {spec.pos_resize}"
    dropped = tuple(sorted({name.split(".")[0] for name in source if name.startswith(_HEAD)}))
    return target, TransferReport(len(kept), resized, dropped, f"{old.num_classes} -> {spec.num_classes}")
