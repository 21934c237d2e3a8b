"""Names of models: text to spec and back, with aliases for file names."""

import fnmatch
from collections.abc import Sequence

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.families import FAMILIES, family_of
from vitlab.models.spec import ModelSpec, Spec, changed


def list_models(pattern: str = "*") -> list[str]:
    """List the names that match a shell pattern such as `ViT-*`, whatever their case; more can be built.

    Args:
        pattern: As in a shell: * for any text, ? for one character.
    """
    listed = [name for family in FAMILIES.values() for name in family.listed]
    return [name for name in listed if fnmatch.fnmatchcase(name.casefold(), pattern.casefold())]


def parse_name(name: str) -> ModelSpec:
    """The spec behind a name or alias, at the paper's default sizes."""
    for family in FAMILIES.values():
        if (spec := family.parse(name)) is not None:
            return spec
    raise UnknownName("model", name, list_models(), hint="See `vitlab models list`.")


def format_name(spec: ModelSpec) -> str:
    """The name of a spec, which has its architecture and not its conventions.

    An architecture that the grammar cannot spell is described, so that no name ever means another model.
    """
    family = family_of(spec)
    name, architecture = family.spell(spec), family.architecture(spec)
    try:
        if (named := family.parse(name)) is not None and family.architecture(named) == architecture:
            return name
    except UsageError:
        pass
    return f"{name} (changed: {architecture})"


def alias(name: str) -> str:
    """The name in a form that is safe as a file name: `ViT-B/16` -> `vit-b-16`."""
    for family in FAMILIES.values():
        for word, safe in family.alias_words.items():
            name = name.replace(word, safe)
    return name.casefold().replace("+", "-").replace("/", "-")


def with_size(
    spec: Spec,
    *,
    image_size: int | Sequence[int] | None = None,
    num_classes: int | None = None,
    in_channels: int | None = None,
) -> Spec:
    """The spec at another image size (an int is a square), classes or channels."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    changes = {"image_size": size, "num_classes": num_classes, "in_channels": in_channels}
    return changed(spec, {key: value for key, value in changes.items() if value is not None})
