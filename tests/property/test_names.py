"""The name grammar goes both ways, for every name it can say."""

import string

from hypothesis import given
from hypothesis import strategies as st

from vitlab.core.errors import VitlabError
from vitlab.models.efficientnet_spec import SCALINGS
from vitlab.models.names import alias, format_name, list_models, parse_name
from vitlab.models.sizes import RESNET_STAGES, VIT_SIZES

heads, per_head = st.integers(1, 16), st.integers(1, 64)
spelled_out = st.builds(
    lambda h, c, depth, mlp: f"w{h * c}d{depth}m{mlp}h{h}", heads, per_head, st.integers(1, 64), st.integers(1, 9999)
)
sizes = st.sampled_from(sorted(VIT_SIZES)) | spelled_out
patches = st.integers(1, 300)
dividing_224 = st.sampled_from([side for side in range(1, 225) if 224 % side == 0])
depths = st.sampled_from(sorted(RESNET_STAGES))
names = st.one_of(
    st.builds("ViT-{}/{}".format, sizes, patches),
    st.builds("Axial-ViT-{}/{}".format, sizes, dividing_224),
    st.builds("R{}+ViT-{}/{}".format, depths, sizes, st.sampled_from([16, 32])),
    st.builds("R+ViT-{}/16".format, sizes),
    st.builds("BiT-R{}x{}{}".format, depths, st.integers(1, 8), st.sampled_from(["", "+NL"])),
    st.sampled_from(sorted(SCALINGS)).map("EfficientNet-{}".format),
    st.builds("AxialResNet-{}-{}".format, st.sampled_from([26, 50]), st.sampled_from("SML")),
    st.builds("AxialResNet-50-w{}".format, st.integers(1, 32).map(lambda n: 8 * n)),
)


@given(names)
def test_parse_then_format_gives_the_same_model(name: str) -> None:
    spec = parse_name(name)
    assert parse_name(format_name(spec)) == spec


@given(sizes, patches)
def test_axial_model_takes_any_patch_too(size: str, patch: int) -> None:
    assert format_name(parse_name(f"Axial-ViT-{size}/{patch}")) == f"Axial-ViT-{size}/{patch}"


@given(names)
def test_alias_means_the_same_model_and_is_a_safe_file_name(name: str) -> None:
    short = alias(name)
    assert parse_name(short) == parse_name(name)
    assert alias(short) == short
    assert set(short) <= set(string.ascii_lowercase + string.digits + "-")


@given(st.lists(names, min_size=2, max_size=8, unique=True))
def test_different_models_have_different_aliases(some: list[str]) -> None:
    models = {format_name(parse_name(name)) for name in some}
    assert len({alias(name) for name in models}) == len(models)


@given(st.text(max_size=30) | st.from_regex(r"(R\d{0,3}\+)?[Vv]i[Tt]-[A-Za-z0-9]{1,6}[/-]\d{1,4}", fullmatch=True))
def test_any_text_is_a_model_or_a_clear_error(text: str) -> None:
    try:
        spec = parse_name(text)
    except VitlabError as error:
        assert str(error)
    else:
        assert parse_name(format_name(spec)) == spec


def test_every_size_in_the_tables_survives_its_alias() -> None:
    for size in VIT_SIZES:
        for name in (f"ViT-{size}/14", f"R50+ViT-{size}/32", f"R+ViT-{size}/16", f"Axial-ViT-{size}/16"):
            assert format_name(parse_name(alias(name))) == name


def test_every_listed_name_is_its_own_canonical_form() -> None:
    assert [format_name(parse_name(name)) for name in list_models()] == list_models()
