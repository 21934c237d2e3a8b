"""The options of a verb as a dataclass: declared once, for the Python function and for the command line.

@dataclass(frozen=True)
class PredictOptions(Machine):
    model: Annotated[StrPath, Opt("A bundle, a run, a file of weights, or a name.", "MODEL")]
    _: KW_ONLY
    top: int = opt(5, "How many labels for each image.", "K")

@takes(PredictOptions)
def predict(options: PredictOptions) -> Predictions: ...

The words of an option stand beside its default; of one that must be given, or that several verbs share, in its type.
`predict("run", top=3)` builds the value and hands it over, and a type checker knows every keyword. Fields before `KW_ONLY` are
positional, here and in a shell. Nothing in this room imports torch, so that `--help` never waits for it.
"""

import dataclasses
import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitlab.core.command import command_line
from vitlab.core.config import override_texts
from vitlab.core.errors import UsageError
from vitlab.core.planned import DryRunEnded

P = ParamSpec("P")
Value = TypeVar("Value")
Result = TypeVar("Result")

StrPath = str | Path
_MACHINE, _OUTPUT = "Machine", "Output"  # panels of what verbs share


@dataclasses.dataclass(frozen=True)
class Opt:
    """What people read about an option. `flag` is its name in a shell where that differs; `parse` reads it from there."""

    help: str
    metavar: str | None = None
    flag: str | None = None
    short: str | None = None
    parse: Callable[[str], Any] | None = None
    panel: str | None = None
    named: bool = False  # by its flag in a shell, also where Python takes it by position
    changes_result: bool = True  # others are left out of the command that repeats a piece of work


def opt(
    default: Any,
    help: str,
    metavar: str | None = None,
    *,
    flag: str | None = None,
    parse: Callable[[str], Any] | None = None,
    panel: str | None = None,
    named: bool = False,
    changes_result: bool = True,
) -> Any:
    """A field of an options class with its default and the words of an `Opt`."""
    words = Opt(help, metavar, flag, parse=parse, panel=panel, named=named, changes_result=changes_result)
    return dataclasses.field(default=default, metadata={"opt": words})


@dataclasses.dataclass(frozen=True)
class Declared:
    """One option, as the dataclass declares it."""

    name: str
    kind: Any  # its type, without None
    default: Any  # MISSING where it has to be given
    positional: bool
    opt: Opt

    @property
    def argument(self) -> bool:
        """Whether a shell takes it without a flag."""
        return self.positional and not self.opt.named

    @property
    def flag(self) -> str:
        """`label-map` for the field `label_map`, unless it has a name of its own."""
        return self.opt.flag or self.name.replace("_", "-")

    @property
    def takes_several(self) -> bool:
        """Whether it may be given more than once in a shell."""
        return self.opt.parse is None and any(
            get_origin(kind) is Sequence for kind in (self.kind, *get_args(self.kind))
        )


@functools.cache
def declared(options: type) -> tuple[Declared, ...]:
    """The options of a dataclass: arguments first, its own next, and those that it shares with others last."""
    hints = get_type_hints(options, include_extras=True)
    found: list[Declared] = []
    for field in dataclasses.fields(options):
        kind = hints[field.name]
        kind, words = (kind, field.metadata["opt"]) if field.metadata else get_args(kind)
        found.append(Declared(field.name, _without_none(kind), field.default, not field.kw_only, words))
    return tuple(sorted(found, key=lambda each: (not each.positional, each.opt.panel in (_MACHINE, _OUTPUT))))


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    rest = [each for each in get_args(kind) if each is not type(None)]
    return rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007 (built at run time)


def takes(options: Callable[P, Value]) -> Callable[[Callable[[Value], Result]], Callable[P, Result]]:
    """Make a function of one options value callable with the options themselves."""

    def decorate(function: Callable[[Value], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            _require_signature(function.__name__, signature, args, kwargs)
            try:
                return function(options(*args, **kwargs))
            except DryRunEnded as ended:  # the one result that every verb can have, and only where it is asked for
                return cast(Result, ended.planned)

        assert isinstance(options, type)
        returns = get_type_hints(function).get("return")
        signature = _signature(options, returns)
        vars(call)["__signature__"] = signature
        call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()} | {
            "return": returns
        }
        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{describe(options)}"
        return call

    return decorate


def _signature(options: type, returns: Any) -> inspect.Signature:
    hints, plain = get_type_hints(options), inspect.signature(options)
    kinds = [plain.parameters[each.name].replace(annotation=hints[each.name]) for each in declared(options)]
    return inspect.Signature(kinds, return_annotation=returns)


def _require_signature(name: str, signature: inspect.Signature, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Python's own sentence would speak of a class, and of no other name."""
    for key in given:
        if key not in signature.parameters:
            near = difflib.get_close_matches(key, signature.parameters, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise TypeError(f"{name}() got an unexpected keyword argument '{key}'{hint}")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None


def describe(options: type) -> str:
    """The options in words, for the docstring of the function that takes them."""
    return "\n".join(["Args:", *(f"    {each.name}: {each.opt.help}" for each in declared(options))])


def command_of(verb: str, options: Any, leave_out: Collection[str] = (), **others: object) -> str:
    """The command line that repeats a call: what was given and changes the result. `others` replace values, by name."""
    arguments, flags = arguments_of(options, leave_out, others)
    return command_line(verb, *arguments, options=flags)


def arguments_of(
    options: Any, leave_out: Collection[str] = (), others: Mapping[str, object] = types.MappingProxyType({})
) -> tuple[list[object], dict[str, object]]:
    """The same before it is text: what is given by position, and by flag."""
    arguments, flags = list[object](), dict[str, object]()
    for each in (each for each in declared(type(options)) if each.name not in leave_out):
        value = others.get(each.name, getattr(options, each.name))
        if each.argument:
            arguments += [] if value is None else _items(value)
        elif each.opt.changes_result and value != each.default:
            flags.update([_flag(each, value)])
    return arguments, flags


def _flag(option: Declared, value: Any) -> tuple[str, object]:
    """The flag and what follows it."""
    if option.kind is bool and not value:
        return f"no-{option.flag}", True
    if isinstance(value, Mapping) and not option.opt.parse:  # overrides
        return option.flag, override_texts(cast(Mapping[str, Any], value))
    return option.flag, ",".join(map(str, _items(value))) if option.opt.parse else value


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [f"{key}={item}" for key, item in cast(Mapping[str, Any], value).items()]
    return list(value) if isinstance(value, list | tuple) else [value]


# --- how texts of a shell are read ------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """`1,5,10`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"'{text}' should be whole numbers separated by commas") from None


def names(text: str) -> tuple[str, ...]:
    """`filters,positions`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def size(text: str) -> int | tuple[int, int]:
    """`224` or `224,320` (height, width)."""
    try:
        found = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        found = []
    if len(found) not in (1, 2):
        raise UsageError(f"'{text}' is not an image size", hint="Write 224, or 224,320 for height and width.")
    return found[0] if len(found) == 1 else (found[0], found[1])


def pairs(text: str) -> dict[str, str]:
    """`path=filename,label=species`."""
    found = [part.partition("=") for part in text.split(",")]
    if not all(key.strip() and value.strip() for key, _, value in found):
        raise UsageError(f"'{text}' is not a list of NAME=COLUMN", hint="Write path=filename,label=species.")
    return {key.strip(): value.strip() for key, _, value in found}


# --- what verbs share -------------------------------------------------------------------------------------------------

Device = Annotated[str, Opt("cpu, cuda, cuda:1, mps, or auto for the best one present.", "NAME", panel=_MACHINE)]
Seed = Annotated[int, Opt("The same seed gives the same bits on the same machine.", "N", panel=_MACHINE)]
Threads = Annotated[int | None, Opt("CPU threads; another number can change the last bits.", "N", panel=_MACHINE)]
Quiet = Annotated[bool, Opt("No progress, only the result.", short="-q", panel=_OUTPUT, changes_result=False)]
Verbose = Annotated[
    bool, Opt("Also the details: arrays, positions, what was assumed.", short="-v", panel=_OUTPUT, changes_result=False)
]
BatchSize = Annotated[
    int, Opt("Images at a time; can change the last bits.", "N", panel=_MACHINE, changes_result=False)
]
Workers = Annotated[
    int | None, Opt("Processes that load images; default one per core.", "N", panel=_MACHINE, changes_result=False)
]
Columns = Annotated[
    Mapping[str, str] | None,
    Opt("What a table calls its columns: path=filename,label=species.", "NAME=COL,…", parse=pairs),
]
Part = Annotated[str | None, Opt("test, val, train or all; default the first there is.", "PART")]
Force = Annotated[bool, Opt("Accept a head that is all zeros.")]
Overrides = Annotated[
    Sequence[str] | Mapping[str, Any], Opt("Override one config key; repeatable.", "KEY=VALUE", flag="set")
]
TrustPickle = Annotated[bool, Opt("Let a torch file run code. Only for your own.")]
DryRun = Annotated[bool, Opt("Check everything, say what would happen, do nothing.", changes_result=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the work is done."""

    device: Device = "auto"
    seed: Seed = 0
    threads: Threads = None
    quiet: Quiet = False
    verbose: Verbose = False


LAST_BITS = ("device", "threads")  # of inference, they change no more than these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inference(Machine):
    """Where a model is run over many images."""

    batch_size: BatchSize = 64
    workers: Workers = None
