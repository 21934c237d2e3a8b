"""The name grammar: both ways, with aliases, and errors that help."""

import pytest

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import alias, format_name, list_models, parse_name, with_size
from vitlab.models.sizes import VIT_SIZES
from vitlab.models.spec import BiTSpec, ViTSpec


@pytest.mark.parametrize("name", list_models())
def test_listed_names_and_aliases_round_trip(name: str) -> None:
    spec = parse_name(name)
    assert format_name(spec) == name
    assert parse_name(alias(name)) == spec
    assert alias(alias(name)) == alias(name)
    assert set("/+ ").isdisjoint(alias(name)) and alias(name) == alias(name).lower()


def test_aliases_are_distinct_even_where_case_is_lost() -> None:
    aliases = [alias(name) for name in list_models()]
    assert len(set(aliases)) == len(aliases)


@pytest.mark.parametrize(
    ("name", "patch", "image"),
    [("ViT-S/4", 4, 224), ("ViT-B/14", 14, 224), ("ViT-Ti/9", 9, 225), ("ViT-w64d6m128h4/2", 2, 224)],
)
def test_any_patch_size_works(name: str, patch: int, image: int) -> None:
    spec = parse_name(name)
    assert isinstance(spec, ViTSpec)
    assert spec.patch == patch and spec.image_size == (image, image) and format_name(spec) == name


def test_hybrids_keep_the_layer_count_at_stride_16() -> None:
    wide, deep = parse_name("R50+ViT-B/32"), parse_name("R50+ViT-B/16")
    assert isinstance(wide, ViTSpec) and isinstance(deep, ViTSpec) and wide.stem and deep.stem
    assert wide.stem.stages == (3, 4, 6, 3) and wide.stride == 32 and wide.grid == (7, 7)
    assert deep.stem.stages == (3, 4, 9) and deep.stride == 16 and deep.grid == (14, 14)


def test_bit_depth_and_width_ride_in_the_name() -> None:
    spec = parse_name("BiT-R101x3")
    assert isinstance(spec, BiTSpec)
    assert spec.trunk.stages == (3, 4, 23, 3) and spec.trunk.out_channels == 3 * 2048


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("ViT-B16", "ViT-B/16"), ("vit-b/16", "ViT-B/16"), ("BiT-R50", "BiT-R50x1"), ("R50-ViT-B/16", "R50+ViT-B/16")],
)
def test_an_unknown_name_lists_the_nearest_three(given: str, nearest: str) -> None:
    with pytest.raises(UnknownName) as caught:
        parse_name(given)
    assert caught.value.nearest[0] == nearest and len(caught.value.nearest) == 3
    assert given in str(caught.value) and nearest in str(caught.value)


@pytest.mark.parametrize(
    "given", ["ViT-B/0", "R50+ViT-B/8", "R+ViT-Ti/32", "ViT-X/16", "BiT-R51x1", "BiT-R50x0", "", "/"]
)
def test_names_outside_the_grammar_are_usage_errors(given: str) -> None:
    with pytest.raises(UsageError):
        parse_name(given)


def test_list_models_takes_a_pattern() -> None:
    assert list_models("R*+ViT-L/*") == ["R50+ViT-L/32", "R50+ViT-L/16"]
    assert list_models("bit-*") == [name for name in list_models() if name.startswith("BiT")]
    assert list_models("nothing*") == []


def test_with_size_takes_a_side_or_a_rectangle() -> None:
    spec = with_size(parse_name("ViT-B/16"), image_size=384, num_classes=5, in_channels=1)
    assert spec.image_size == (384, 384) and spec.num_classes == 5 and spec.in_channels == 1
    assert with_size(spec, image_size=(224, 320)).grid == (14, 20)


def test_sizes_are_those_of_table_1() -> None:
    """Width, depth, MLP and heads; Ti and S are those of the released code. No parameter tells the number of heads."""
    sizes = {"Ti": (192, 12, 768, 3), "S": (384, 12, 1536, 6), "B": (768, 12, 3072, 12)}
    sizes |= {"L": (1024, 24, 4096, 16), "H": (1280, 32, 5120, 16)}
    assert {name: tuple(VIT_SIZES[name]) for name in sizes} == sizes
