"""Google's BiT `.npz` files.

Facts: big_transfer's `bit_pytorch/models.py` and big_vision's `models/bit_paper.py`.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from vitlab.core.errors import FileProblem
from vitlab.models.spec import BiTSpec, bit_trunk
from vitlab.weights.conventions import usual_preprocess
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import compare, read_stages
from vitlab.weights.moves import CONV, CONV_HEAD, SAME
from vitlab.weights.rules import Rule, spell_drop

_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_NUMBERED_CONV = re.compile(r"/standardized_conv2d_\d+/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiTDialect:
    """The names in a file whose convolutions have numbers: TensorFlow counts layers of one name (`standardized_conv2d_17`)."""

    numbered: tuple[str, ...] = ()


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("resnet/root_block/") for name in arrays)


def read_dialect(arrays: Mapping[str, Tensor]) -> BiTDialect:
    return BiTDialect(numbered=tuple(name for name in arrays if _NUMBERED_CONV.search(name)))


def read_spec(arrays: Mapping[str, Tensor], origin: str) -> BiTSpec:
    """Derive the spec from the arrays; the image size, which is free, is 224."""
    twice, times = Counter(_without_number(name) for name in arrays).most_common(1)[0]
    if times > 1:
        raise FileProblem(
            f"{origin} holds {twice} {times} times, under other numbers", hint=f"Leave some out: {spell_drop('NAME')}."
        )
    arrays = {_without_number(name): array for name, array in arrays.items()}
    stages = read_stages(arrays, r"resnet/block(\d+)/unit(\d+)/", origin, first=1, form="02d")
    root, head = arrays.get(_ROOT), arrays.get("resnet/head/conv2d/kernel")
    if root is None or root.ndim != 4 or not stages or (head is not None and head.ndim != 4):
        raise FileProblem(f"{origin} looks like a BiT file, but its root or its blocks are not whole")
    trunk = bit_trunk(stages, max(1, root.shape[3] // 64))
    return BiTSpec(trunk=trunk, in_channels=root.shape[2], num_classes=0 if head is None else head.shape[3])


def _without_number(name: str) -> str:
    return _NUMBERED_CONV.sub("/standardized_conv2d/", name)


def differences(spec: BiTSpec, *, big_vision: bool) -> tuple[str, ...]:
    """What BiT's code computes differently from `spec`."""
    usual = bit_trunk(spec.trunk.stages, spec.trunk.width_factor)
    usual = dataclasses.replace(usual, pool_padding="neg-inf" if big_vision else "zero")
    return compare(spec.trunk, dataclasses.asdict(usual), "trunk.")


def rules(spec: BiTSpec, dialect: BiTDialect) -> list[Rule]:
    found = [
        Rule(r"trunk\.root\.weight", (_ROOT,), CONV),
        Rule(r"norm\.weight", ("resnet/group_norm/gamma",)),
        Rule(r"norm\.bias", ("resnet/group_norm/beta",)),
        Rule(r"head\.weight", ("resnet/head/conv2d/kernel",), CONV_HEAD),
        Rule(r"head\.bias", ("resnet/head/conv2d/bias",), SAME),
    ]
    for stage, count in enumerate(spec.trunk.stages):
        for unit in range(count):
            ours, theirs = rf"trunk\.stages\.{stage}\.{unit}\.", f"resnet/block{stage + 1}/unit{unit + 1:02d}/"
            for number, letter in enumerate("abc", start=1):
                found += [
                    Rule(rf"{ours}conv{number}\.weight", (f"{theirs}{letter}/standardized_conv2d/kernel",), CONV),
                    Rule(rf"{ours}norm{number}\.weight", (f"{theirs}{letter}/group_norm/gamma",)),
                    Rule(rf"{ours}norm{number}\.bias", (f"{theirs}{letter}/group_norm/beta",)),
                ]
            found.append(Rule(rf"{ours}proj\.weight", (f"{theirs}a/proj/standardized_conv2d/kernel",), CONV))
    numbered = {_without_number(name): name for name in dialect.numbered}
    return [dataclasses.replace(rule, theirs=tuple(numbered.get(name, name) for name in rule.theirs)) for rule in found]


FORMATS = (
    Format(
        name="bit-npz",
        targets=("google-npz", "big-vision"),
        spec=BiTSpec,
        dialect=BiTDialect,
        recognises=lambda arrays, _: recognises(arrays),
        read_dialect=read_dialect,
        read_spec=lambda arrays, origin, _, __: read_spec(arrays, origin),
        rules=rules,
        preprocess=lambda spec, _: usual_preprocess(spec, {"antialias": False}),
        notes=lambda spec, _, target: differences(spec, big_vision=target == "big-vision"),
    ),
)
