"""The paper's name grammar: text -> spec and spec -> text, with file-system aliases both ways.

    ViT-B/16   R50+ViT-B/16   R+ViT-Ti/16   BiT-R50x1   Axial-ViT-B/16   ViT-w64d6m128h4/2   vit-b-16

The patch size is part of the grammar, so any of it works; a size outside the tables is spelled out (`w64d6m128h4`).
"""

import dataclasses
import fnmatch
import re
from collections.abc import Sequence

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.sizes import LISTED_NAMES, RESNET_STAGES, VIT_SIZES, Size
from vitlab.models.spec import BiTSpec, ModelSpec, TrunkSpec, ViTSpec, bit_trunk, changed

# Numbers have at most nine digits: enough for any model, and few enough for every reader of numbers.
_N = r"\d{1,9}"
_VIT = re.compile(rf"(?:(?P<axial>Axial-)|R(?P<resnet>\d{{0,9}})\+)?ViT-(?P<size>[A-Za-z0-9]+)/(?P<stride>{_N})")
_BIT = re.compile(rf"BiT-R(?P<resnet>{_N})x(?P<width>{_N})")
_SPELLED_OUT = re.compile(rf"w({_N})d({_N})m({_N})h({_N})")

# The root-only stem of R+ViT-Ti/16 halves twice, so its 8x8 patches give a true stride of 32. The authors' own parameter
# count (6,337,704) confirms it; their config comment and the name say 16.
_ROOT_ONLY_PATCH = 8

# Two sizes differ by case only, which a file system may not keep apart: giant is g, gigantic is G.
_SIZE_ALIASES = {"G": "gigantic"}


def list_models(pattern: str = "*") -> list[str]:
    """The listed names that match a shell pattern such as `ViT-*`; the grammar builds others too."""
    return [name for name in LISTED_NAMES if fnmatch.fnmatchcase(name.casefold(), pattern.casefold())]


def parse_name(name: str) -> ModelSpec:
    """The spec behind a name or its alias, at the paper's defaults (224x224, 3 channels, 1000 classes)."""
    canonical = _from_alias(name)
    if match := _BIT.fullmatch(canonical):
        return BiTSpec(trunk=bit_trunk(_stages(name, match["resnet"]), int(match["width"])))
    if not (match := _VIT.fullmatch(canonical)):
        raise UnknownName("model", name, LISTED_NAMES, hint="See `vitlab models list`.")
    size, stride = _size(name, match["size"]), int(match["stride"])
    if match["resnet"] is None:
        if not stride:
            raise UsageError(f"'{name}' has a patch of 0 pixels")
        # The default image is 224 px where the patch divides it, else the nearest whole number of patches.
        side = max(1, round(224 / stride)) * stride
        plain = ViTSpec(**size._asdict(), patch=stride, image_size=(side, side))
        # Class token and pooling of axial models are not stated in the paper (D.6); a grid has no room for a class token.
        return dataclasses.replace(plain, attention="axial", pool="gap") if match["axial"] else plain
    if match["resnet"] == "":
        if stride != 16:
            raise UsageError(f"'{name}': the root-only hybrid exists with /16 only")
        return ViTSpec(**size._asdict(), patch=_ROOT_ONLY_PATCH, stem=TrunkSpec(stages=()))
    if stride not in (16, 32):
        raise UsageError(f"'{name}': a hybrid's number is its total stride, 16 or 32, not {stride}")
    stages = _stages(name, match["resnet"])
    # Stride 16 moves the last stage's units into the third, so the depth stays (paper section 4.1).
    kept = stages if stride == 32 else (*stages[:2], stages[2] + stages[3])
    return ViTSpec(**size._asdict(), patch=1, stem=TrunkSpec(stages=kept))


def format_name(spec: ModelSpec) -> str:
    """The name of a spec. It tells the architecture, not its conventions: those are the spec's other fields.

    An architecture that the grammar cannot spell is described, so that no name ever means another model.
    """
    name = _spell(spec)
    try:
        if _architecture(parse_name(name)) == _architecture(spec):
            return name
    except UsageError:
        pass
    return f"{name} (changed: {_architecture(spec)})"


def _architecture(spec: ModelSpec) -> str:
    if isinstance(spec, BiTSpec):
        return f"{spec.trunk.stages} units, width x{spec.trunk.width_factor}"
    stem = f", stem {spec.stem.stages} x{spec.stem.width_factor} preact={spec.stem.preact}" if spec.stem else ""
    size = f"w{spec.width}d{spec.depth}m{spec.mlp_dim}h{spec.heads}"
    return f"{size}, patch {spec.patch}, {spec.attention} attention{stem}"


def _spell(spec: ModelSpec) -> str:
    if isinstance(spec, BiTSpec):
        return f"BiT-{_resnet_name(spec.trunk.stages)}x{spec.trunk.width_factor}"
    size = Size(spec.width, spec.depth, spec.mlp_dim, spec.heads)
    label = next((known for known, row in VIT_SIZES.items() if row == size), "w{}d{}m{}h{}".format(*size))
    if spec.attention == "axial":
        return f"Axial-ViT-{label}/{spec.patch}"
    if spec.stem is None:
        return f"ViT-{label}/{spec.patch}"
    if not spec.stem.stages:
        return f"R+ViT-{label}/16"
    return f"{_resnet_name(spec.stem.stages)}+ViT-{label}/{spec.stride}"


def alias(name: str) -> str:
    """A form of `name` that is safe as a file name, lower-case and without `/` and `+`: `ViT-B/16` -> `vit-b-16`."""
    canonical = _from_alias(name)
    if match := _VIT.fullmatch(canonical):
        size = _SIZE_ALIASES.get(match["size"], match["size"])
        canonical = canonical[: match.start("size")] + size + canonical[match.end("size") :]
    return canonical.casefold().replace("+", "-").replace("/", "-")


_ALIAS_VIT = re.compile(r"(?:(?P<axial>axial)-|(?P<resnet>r\d*)-)?vit-(?P<size>[a-z0-9]+)-(?P<stride>\d+)")


def _from_alias(name: str) -> str:
    """The canonical spelling of an alias; anything else unchanged."""
    if match := _ALIAS_VIT.fullmatch(name):
        sizes = {_SIZE_ALIASES.get(size, size).casefold(): size for size in VIT_SIZES}
        prefix = "Axial-" if match["axial"] else f"{match['resnet'].upper()}+" if match["resnet"] else ""
        return f"{prefix}ViT-{sizes.get(match['size'], match['size'])}/{match['stride']}"
    if name.startswith("bit-r"):
        return name.replace("bit-r", "BiT-R", 1)
    return name


def _size(name: str, label: str) -> Size:
    if label in VIT_SIZES:
        return VIT_SIZES[label]
    if match := _SPELLED_OUT.fullmatch(label):
        return Size(*map(int, match.groups()))
    raise UnknownName("model", name, LISTED_NAMES, hint=f"Sizes: {', '.join(VIT_SIZES)}.")


def _stages(name: str, depth: str) -> tuple[int, ...]:
    if int(depth) not in RESNET_STAGES:
        raise UnknownName("model", name, LISTED_NAMES, hint=f"ResNet depths: {', '.join(map(str, RESNET_STAGES))}.")
    return RESNET_STAGES[int(depth)]


def _resnet_name(stages: tuple[int, ...]) -> str:
    for depth, known in RESNET_STAGES.items():
        if stages in (known, (*known[:2], known[2] + known[3])):
            return f"R{depth}"
    return f"R({','.join(map(str, stages))})"


def with_size(
    spec: ModelSpec,
    *,
    image_size: int | Sequence[int] | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
) -> ModelSpec:
    """`spec` at another image size, class count or channel count, checked like a config; an `int` size means a square."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    changes = {"image_size": size, "num_classes": num_classes, "in_channels": in_channels}
    return changed(spec, {key: value for key, value in changes.items() if value is not None})
