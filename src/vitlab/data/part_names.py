"""Which part of a data set is tested and validated on, by the parts it has. `data/parts.py` divides the images by it."""

from collections.abc import Collection


def test_part(parts: Collection[str]) -> str | None:
    """The name of the part that is tested on: `val` where there is no `test`, as everywhere with ImageNet."""
    return next((name for name in ("test", "val") if name in parts), None)


def validation_part(parts: Collection[str], val_from: str = "part", val_frac: float = 0.0) -> str | None:
    """The name of the part to validate on; None where that is tested on, or a share of `train` is asked for instead."""
    held_out = val_from == "train" and val_frac > 0
    return "val" if "val" in parts and "test" in parts and not held_out else None
