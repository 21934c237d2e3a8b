"""What every format derives from arrays and settings: sizes, counts, heads.

Owns the questions, not the names: each format says where to look. An answer that cannot be is a `FileProblem` that says so.
"""

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vitlab.core import config as typed
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.data.rules import MOST_BITS
from vitlab.models.sizes import VIT_SIZES
from vitlab.models.spec import Pair, TrunkSpec, ViTSpec

_SAY_RULE = "Say another preprocessing with vitlab convert --preprocess (in Python: preprocess=)"
OTHER_RULE = f"{_SAY_RULE}: a preprocess.json with resize=squash and crop_frac=1 fits."
# How a caller states what no array shows, by field of the spec.
_STATED = {"heads": "heads", "gelu": "gelu", "norm_eps": "norm_eps", "image_size": "grid"}
MOST_BLOCKS = 1000  # far more than any model has; a hostile file must not make us build a million


@contextlib.contextmanager
def as_file_problem(origin: str) -> Generator[None]:
    """Turn a UsageError into a FileProblem: an impossible spec is the file's fault."""
    try:
        yield
    except UsageError as error:
        raise FileProblem(f"{origin} holds no model that can be built: {error.what}") from error


def shape_of(arrays: Mapping[str, Tensor], name: str, axes: int, origin: str) -> tuple[int, ...]:
    if name not in arrays:
        raise FileProblem(f"{origin} lacks {name}")
    shape = tuple(arrays[name].shape)
    if len(shape) != axes or 0 in shape:
        raise FileProblem(f"{origin}: {name} has shape {list(shape)}; {axes} axes were expected, none of them empty")
    return shape


def count_from(first: int, numbers: Iterable[str], what: str, origin: str, form: str = "d") -> int:
    """Count consecutive numbers; a stray one must not become a giant model.

    Compared as text, because `01` and `1` are two names, and a number of 5000 digits is none.
    """
    found = set(numbers)
    if not found or len(found) > MOST_BLOCKS or found != {format(first + n, form) for n in range(len(found))}:
        raise FileProblem(f"{origin}: its {what} are not numbered from {first} on without a gap, or are too many")
    return len(found)


def depth_of(arrays: Mapping[str, Tensor], prefix: str, origin: str, end: str = ".") -> int:
    """How many blocks there are, numbered from 0 behind `prefix`."""
    found = (re.match(re.escape(prefix) + r"(\d+)" + re.escape(end), name) for name in arrays)
    return count_from(0, (match[1] for match in found if match), "blocks", origin)


def read_stages(
    arrays: Mapping[str, Tensor], unit: str, origin: str, first: int = 0, form: str = "d", first_unit: int | None = None
) -> tuple[int, ...]:
    """Units per stage; `unit` is a pattern for stage and unit numbers, which both start at `first` unless said otherwise."""
    units: dict[str, set[str]] = {}
    for name in arrays:
        if match := re.match(unit, name):
            units.setdefault(match[1], set()).add(match[2])
    stages = range(first, first + count_from(first, units, "stages", origin)) if units else ()
    start = first if first_unit is None else first_unit
    return tuple(count_from(start, units[str(stage)], f"units in stage {stage}", origin, form) for stage in stages)


def read_trunk(arrays: Mapping[str, Tensor], root: Sequence[int], unit: str, origin: str, *, preact: bool) -> TrunkSpec:
    """A trunk as the peers compute it; `unit` is the pattern for `read_stages`."""
    with as_file_problem(origin):
        return TrunkSpec(
            stages=read_stages(arrays, unit, origin),
            width_factor=root[0] // 64,
            preact=preact,
            **_trunk_conventions(preact),
        )


def trunk_differences(trunk: TrunkSpec, prefix: str) -> tuple[str, ...]:
    """What timm and transformers will compute otherwise than `trunk` says."""
    return compare(trunk, _trunk_conventions(trunk.preact), prefix)


def _trunk_conventions(preact: bool) -> dict[str, Any]:
    """How timm and transformers compute any ResNet, as fields of our spec."""
    padding = {"padding": "fixed", "pool_padding": "zero"} if preact else {"padding": "same", "pool_padding": "neg-inf"}
    return {"gn_eps": 1e-5, "ws": "var-eps", "ws_eps": 1e-8, **padding}


def heads_of(width: int, mlp_dim: int, given: Any, origin: str) -> int:
    """The number of heads is in no array: q, k and v hold all heads side by side.

    Without a config it is that of the published size with this width, else width/64, the paper's rule. Tiny models often
    differ, and nothing but their config shows.
    """
    if given is None:
        sizes = (size.heads for size in VIT_SIZES.values() if (size.width, size.mlp_dim) == (width, mlp_dim))
        given = next(sizes, max(1, width // 64))
    if not isinstance(given, int) or isinstance(given, bool) or given < 1 or width % given:
        raise FileProblem(
            f"{origin}: {given!r} heads do not divide a width of {width}",
            hint="State the number with vitlab convert --heads N (in Python: heads=N).",
        )
    return given


def read_size(
    arrays: Mapping[str, Tensor],
    name: str,
    slots: Sequence[int],
    stride: int,
    given: Any,
    origin: str,
    likely: Pair | None = None,
    grid: Pair | None = None,
) -> tuple[Pair, bool]:
    """The image size behind a position table, and whether it has a class slot.

    `given`, or the size that `grid` has, must fit; `likely` is taken if it does; else the grid is square. No square is one
    more than another, so at most one of `slots` fits.
    """
    stated = pair_of(given, origin) or (grid and (grid[0] * stride, grid[1] * stride))
    if name not in arrays:
        side = usual_side(stride)
        return stated or likely or (side, side), False
    tables, length, _ = shape_of(arrays, name, 3, origin)
    for size in (stated,) if stated else (likely, None):
        for slot in slots:
            side = math.isqrt(max(0, length - slot))
            rows, cols = (-(-size[0] // stride), -(-size[1] // stride)) if size else (side, side)
            if rows * cols == length - slot > 0 and tables == 1:
                return size or (side * stride, side * stride), slot == 1
    fits = f"an image of {stated[0]}x{stated[1]}" if stated else "a square grid"
    hint = None if stated else "State its rows and columns with vitlab convert --grid H,W (in Python: grid=(H, W))."
    raise FileProblem(f"{origin}: {name} has shape {list(arrays[name].shape)}, which does not fit {fits}", hint=hint)


def usual_side(stride: int) -> int:
    """The side nearest to 224 that the patches fill, where no array shows it."""
    return max(1, round(224 / stride)) * stride


def pair_of(value: Any, origin: str) -> Pair | None:
    """A size as configs write it: one number, or rows and columns."""
    if value is None:
        return None
    sides = (value, value) if isinstance(value, int) else value
    if not (isinstance(sides, list | tuple) and len(sides) == 2 and all(is_whole(side) for side in sides)):
        raise FileProblem(f"{origin}: {value!r} is not an image size")
    return sides[0], sides[1]


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def number(options: Mapping[str, Any], key: str, default: float, origin: str) -> float:
    value = options.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise FileProblem(f"{origin}: {key} is {value!r}, not a number of at least 0")
    return float(value)


def confirm(settings: Mapping[str, Any], held: Mapping[str, Any], origin: str) -> None:
    """Raise where the settings contradict the arrays."""
    for key, value in held.items():
        stated = settings.get(key)
        sides_of_square = [value, value], (value, value)
        if stated is not None and stated != value and stated not in sides_of_square:
            raise FileProblem(f"{origin}: its settings say {key}={stated!r}, but its arrays hold {value!r}")


def tell_assumed(spec: ViTSpec, stated: Mapping[str, Any], settings: Mapping[str, str]) -> tuple[str, ...]:
    """A note on fields that no array determines and no setting stated."""
    fields = [field for field, setting in settings.items() if stated.get(setting) is None]
    if not fields:
        return ()
    what = ", ".join(f"{name}={getattr(spec, name)}" for name in fields)
    ways = [_STATED[name] for name in fields]
    options = ", ".join(f"--{way.replace('_', '-')}" for way in ways)
    python = ", ".join(f"{way}=" for way in ways)
    return (
        f"No array shows this, so it is assumed: {what}. If it is wrong: vitlab convert {options} (in Python: {python})",
    )


def require_known(arrays: Mapping[str, Tensor], strange: Mapping[str, str], origin: str) -> None:
    """Refuse relatives that vitlab does not have, by patterns over array names."""
    for pattern, what in strange.items():
        if any(re.match(pattern, name) for name in arrays):
            raise FileProblem(f"{origin} {what}; vitlab has no such model")


def class_names(found: Sequence[Any], count: int) -> tuple[tuple[str, ...], str | None]:
    """Class names or, if unusable, numbers; and a note for the reader."""
    numbers = tuple(str(index) for index in range(count))
    if len(found) != count or not all(isinstance(name, str) and name.isprintable() for name in found):
        problem = f"{len(found)} names" if len(found) != count else "names that are not texts"
        return numbers, f"The settings have {problem} for {count} classes; the classes are called by their numbers."
    twice = [name for name, times in Counter(found).items() if times > 1]
    return tuple(found), f"Several classes have the same name: {', '.join(twice[:3])}" if twice else None


def require_plain(format_name: str, spec: ViTSpec) -> None:
    """Raise for what torch formats cannot express and arrays would not show."""
    if spec.attention != "full" or spec.pos not in ("learned", "none") or spec.pos_at != "stem":
        what = f"attention={spec.attention}, pos={spec.pos} and pos_at={spec.pos_at}"
        raise UsageError(f"the {format_name} format has no place for a model with {what}")


# --- preprocessing that the settings of others cannot say ---------------------------------------------------------------

_EXACT = "vitlab_preprocess"  # a key of ours beside theirs, which say the nearest that they have


def preprocess_difference(whose: str, rule: Preprocess) -> str | None:
    """What timm and transformers cannot express in a preprocessing."""
    differing: list[str] = []
    if not rule.antialias or rule.filter == "area":
        differing.append(f"{whose} resize antialiases; this preprocessing is {rule.filter}, antialias={rule.antialias}")
    if rule.bits != MOST_BITS:
        differing.append(f"{whose} reader scales 16-bit grey by 16 bits; this preprocessing has bits={rule.bits}")
    return "; ".join(differing) or None


def exact_rule(rule: Preprocess) -> dict[str, Any]:
    return {_EXACT: typed.to_dict(rule)} if preprocess_difference("", rule) else {}


def read_exact_rule(
    settings: Mapping[str, Any], beside: Mapping[str, Any], nearest: Callable[[Preprocess], Mapping[str, Any]]
) -> Preprocess | None:
    """Our exact rule, unless the settings beside it were edited since."""
    if _EXACT not in settings:
        return None
    rule = typed.from_dict(Preprocess, settings[_EXACT], "preprocess.")
    return rule if all(beside.get(key) == value for key, value in nearest(rule).items()) else None


def compare(ours: object, theirs: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """One phrase for each field that `theirs` sets otherwise."""
    pairs = [(name, getattr(ours, name), value) for name, value in theirs.items()]
    return tuple(f"{prefix}{name} is {value} there, {mine} here" for name, mine, value in pairs if mine != value)
