"""The table of families: every record tells the truth about its model, and what is not in a table fails at once."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from slow_cases import slow_after
from torch import Generator, Tensor, nn

import vitlab
from vitlab.core.errors import UnknownName, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models import init
from vitlab.models.build import allocate, build, create_model
from vitlab.models.cost import count_macs, count_params, count_stored
from vitlab.models.families import FAMILIES, family_of, spec_from_dict
from vitlab.models.family import ActivationBytes, Family
from vitlab.models.model import Model
from vitlab.models.names import format_name, parse_name
from vitlab.models.results import Features
from vitlab.models.spec import ModelSpec, Pair, TokenKind, ViTSpec, spec_to_dict
from vitlab.models.tape import Tape
from vitlab.training.assemble import recompute_blocks
from vitlab.training.freeze import layer_of_each, train_only
from vitlab.training.objective import Objective
from vitlab.training.optim import OptimRule, make_optimizer
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle
from vitlab.weights.formats.table import FORMATS
from vitlab.weights.surgery import for_transfer
from vitlab.weights.targets import write_foreign

SMALL = ViTSpec(width=32, depth=2, mlp_dim=64, heads=4, patch=4, image_size=(16, 16), num_classes=3)
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


# --- each record ------------------------------------------------------------------------------------------------------


def some_first(count: int) -> list[tuple[Family[Any], tuple[str, ...]]]:
    """The first few names of each family, and then the others."""
    return [
        (each, names)
        for part in (slice(count), slice(count, None))
        for each in FAMILIES.values()
        if (names := tuple(each.listed)[part])
    ]


@pytest.mark.parametrize(("family", "names"), slow_after(len(FAMILIES), some_first(2)))
def test_record_names_the_parameters_that_its_model_has(family: Family[Any], names: tuple[str, ...]) -> None:
    state = dict[str, Tensor]()
    for name in names:
        spec = parse_name(name)
        assert type(spec) is family.spec and family_of(spec) is family
        state = allocate(spec).state_dict()
        assert family.input_kernel(spec) in state and state[family.input_kernel(spec)].shape[1] == spec.in_channels
        numbers = {int(match[1]) for key in state if (match := re.match(family.block, key))}
        assert numbers == set(range(spec.num_blocks))
        assert state["head.weight"].shape == (spec.num_classes, spec.representation_width)
        assert sum(tensor.numel() for tensor in state.values()) == count_stored(spec)
        for target in family.lora_targets.values():
            places = [key for key in state if re.fullmatch(family.block + re.escape(target.matrix) + r"\.weight", key)]
            assert len(places) == spec.num_blocks and state[places[0]].shape[0] % target.parts == 0
    behind = [start for start in family.after_blocks if start in ("norm.", "head.")]
    assert "head." in behind and all(any(key.startswith(start) for key in state) for start in behind)


@every_family
def test_record_names_fields_and_formats_that_exist(family: Family[Any]) -> None:
    fields = {field.name for field in dataclasses.fields(family.spec)}
    assert {*family.dropout_fields, *family.free_fields, "image_size", "in_channels", "num_classes"} <= fields
    formats = {found.name for found in FORMATS if found.spec is family.spec}
    assert bool(formats) == bool(family.formats)


def test_formats_that_are_promised_are_there() -> None:
    """Which ones other families have is their own affair."""
    written = {"vit": {"timm", "hf"}, "bit": {"timm", "hf"}, "efficientnet": {"timm", "torchvision"}}
    for kind, names in written.items():
        assert names <= {found.name for found in FORMATS if found.spec is FAMILIES[kind].spec}


# --- what no table has ------------------------------------------------------------------------------------------------

CHOICES = ("pool", "pos", "pos_at", "pos_resize", "attention", "head", "gelu")


@pytest.mark.parametrize("field", CHOICES)
def test_a_value_outside_a_closed_set_is_refused_at_construction(field: str) -> None:
    with pytest.raises(UnknownName, match=field):
        dataclasses.replace(SMALL, **{field: "max"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownName, match=field):
        create_model("ViT-Ti/16", overrides={field: "max"})


@pytest.mark.parametrize("field", ["ws", "padding", "pool_padding"])
def test_a_trunk_too_refuses_what_it_does_not_know(field: str) -> None:
    trunk = vitlab.model_info("BiT-R50x1").spec.trunk  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnknownName, match=field):
        dataclasses.replace(trunk, **{field: "max"})


@pytest.mark.parametrize("pool", ["max", "", None, 3])
def test_an_unknown_pooling_is_never_taken_for_another(pool: Any) -> None:
    with pytest.raises(UnknownName, match="pool"):
        ViTSpec(width=32, depth=1, mlp_dim=64, heads=4, patch=4, image_size=(16, 16), pool=pool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrangerSpec(ModelSpec):
    kind: ClassVar[str] = "stranger"
    image_size: Pair = (8, 8)
    in_channels: int = 3
    num_classes: int = 2


@pytest.mark.parametrize("use", [build, allocate, count_params, count_macs, format_name, create_model])
def test_a_spec_of_no_family_is_refused_by_name(use: Any) -> None:
    with pytest.raises(UsageError, match=r"one of vit, bit, .*not 'stranger'"):
        use(StrangerSpec())


@pytest.mark.parametrize("kind", ["mlp", None, 3, ""])
def test_a_stored_spec_of_no_family_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(UsageError, match="one of vit, bit"):
        spec_from_dict({**spec_to_dict(SMALL), "kind": kind})


def test_unknown_optimisers_and_objectives_are_refused_at_construction() -> None:
    with pytest.raises(UnknownName, match=r"optim\.name"):
        OptimRule(name="lamb", lr=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownName, match=r"optim\.name"):
        dataclasses.replace(OptimRule(lr=0.1), name="lamb")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownName, match=r"objective\.kind"):
        Objective(kind="hinge")  # pyright: ignore[reportArgumentType]


# --- a family of one's own --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixSpec(ModelSpec):
    """Two layers of a plain CNN with batch norm: the least that is a model, with state beside its parameters."""

    kind: ClassVar[str] = "mix"
    width: int = 8
    image_size: Pair = (16, 16)
    in_channels: int = 3
    num_classes: int = 10

    @property
    def stride(self) -> int:
        return 2

    @property
    def num_blocks(self) -> int:
        return 2

    @property
    def representation_width(self) -> int:
        return self.width

    def grid_for(self, image_size: Pair) -> Pair:
        return image_size[0] // 2, image_size[1] // 2


class Layer(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(cout)

    def init_weights(self, generator: Generator | None) -> None:
        init.lecun(self.conv, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Mix(Model):
    recompute_units = (Layer,)

    def __init__(self, spec: MixSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList([Layer(spec.in_channels, spec.width, 2), Layer(spec.width, spec.width, 1)])
        self.head = nn.Linear(spec.width, spec.num_classes) if spec.num_classes else None

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        del tape
        for layer in self.layers:
            x_BCYX = layer(x_BCYX)
        return x_BCYX.mean(dim=(2, 3))

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:
        raise NotImplementedError


MIX = Family(
    spec=MixSpec,
    module=f"{__name__}:Mix",
    listed=("Mix-8", "Mix-16"),
    parse=lambda name: MixSpec(width=int(match[1])) if (match := re.fullmatch(r"[Mm]ix-(\d+)", name)) else None,
    spell=lambda spec: f"Mix-{spec.width}",
    architecture=lambda spec: f"width {spec.width}",
    count_params=lambda spec: (
        9 * spec.width * (spec.in_channels + spec.width) + 4 * spec.width + (spec.width + 1) * spec.num_classes
    ),
    count_buffers=lambda spec: 2 * (2 * spec.width + 1),  # means, variances, and how many batches were seen
    count_macs=lambda spec, _: (
        9 * spec.width * (spec.in_channels + spec.width) * spec.grid[0] * spec.grid[1] + spec.width * spec.num_classes
    ),
    activation_bytes=lambda spec, _, __: ActivationBytes(kept=4 * spec.width, block=2 * spec.width, working=spec.width),
    block=r"layers\.(\d+)\.",
    after_blocks=("head.",),
    input_kernel=lambda _: "layers.0.conv.weight",
)


@pytest.fixture
def mix(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(FAMILIES, "mix", MIX)
    return create_model("Mix-8", num_classes=4, seed=0)


def test_a_family_needs_nothing_but_its_record(mix: Model, tmp_path: Path) -> None:
    assert vitlab.list_models("mix*") == ["Mix-8", "Mix-16"]
    info = vitlab.model_info("mix-16", classes=5)
    assert (info.name, info.alias, info.tokens, info.grid, info.stride) == ("Mix-16", "mix-16", None, None, 2)
    assert info.params == sum(p.numel() for p in create_model("Mix-16", num_classes=5).parameters())
    assert not any(tensor.isnan().any() for tensor in mix.state_dict().values())
    labels = tuple("abcd")
    save_bundle(tmp_path / "bundle", Bundle(mix.eval(), Preprocess(image_size=(16, 16)), labels, "# Mix", {}))
    again = read_bundle(tmp_path / "bundle")
    x = torch.randn(2, 3, 16, 16)
    assert again.model.spec == mix.spec and torch.equal(again.model(x), mix(x))
    answer = vitlab.load(tmp_path / "bundle", device="cpu")
    assert answer.embed([torch.zeros(16, 16, 3, dtype=torch.uint8).numpy()]).shape == (1, 8)
    with pytest.raises(UsageError, match=r"timm .*no place for a Mix-8"):
        write_foreign(again, tmp_path / "timm", "timm")


def test_a_family_is_frozen_trained_and_carried_to_other_classes_by_its_record(mix: Model) -> None:
    assert set(layer_of_each(mix).values()) == {1, 2, 3}
    recompute_blocks(mix)
    optimizer = make_optimizer(mix.train(), OptimRule(lr=0.1, weight_decay=0.1, train="last:1"))
    torch.nn.functional.cross_entropy(mix(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    optimizer.step()
    assert {name for name, p in mix.named_parameters() if p.requires_grad} == {
        *("layers.1.conv.weight", "layers.1.norm.weight", "layers.1.norm.bias", "head.weight", "head.bias"),
    }
    with pytest.raises(UsageError, match="lora"):
        train_only(mix, "lora")
    moved, _ = for_transfer(mix, dataclasses.replace(mix.spec, num_classes=2, image_size=(32, 32)))
    assert moved(torch.randn(2, 3, 32, 32)).shape == (2, 2)
