"""Options are declared once: what the Python function, the shell and the repeated command make of them."""

import inspect
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import pytest

from vitlab.core.errors import UsageError
from vitlab.options.evaluation_options import EvaluateOptions
from vitlab.options.option import Inference, Opt, Overrides, StrPath, command_of, declared, numbers, size, takes
from vitlab.options.training_options import TrainOptions, short_forms


@dataclass(frozen=True)
class Options(Inference):
    model: Annotated[StrPath, Opt("Which one.", metavar="MODEL")]
    images: Annotated[StrPath | Sequence[StrPath], Opt("Which images.")] = ()
    _: KW_ONLY
    top: Annotated[int, Opt("How many.")] = 5
    layers: Annotated[Sequence[int] | None, Opt("Of these.", parse=numbers)] = None
    tasks: Annotated[Sequence[str], Opt("Only these.", flag="task")] = ()
    restrict: Annotated[bool, Opt("No others.")] = False


@takes(Options)
def work(options: Options) -> Options:
    """Do it."""
    return options


def test_function_takes_the_options_by_position_and_by_name() -> None:
    assert work("m", ["a"], top=2, device="cpu") == Options("m", ["a"], top=2, device="cpu")


def test_signature_and_docstring_name_every_option() -> None:
    names = list(inspect.signature(work).parameters)
    assert names[:2] == ["model", "images"]
    shared = ["device", "seed", "threads", "quiet", "verbose", "batch_size", "workers"]
    assert names[-len(shared) :] == shared  # they come last
    assert all(f"    {name}: " in (work.__doc__ or "") for name in names)


def test_mistyped_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"work\(\) .*'toop'; did you mean top"):
        work("m", toop=3)  # pyright: ignore[reportCallIssue]


def test_missing_argument_speaks_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"work\(\): missing a required argument: 'model'"):
        work()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (Options("m"), "vitlab work m"),
        (Options("m", ["a", "b c"], top=2), "vitlab work m a 'b c' --top 2"),
        (Options("m", layers=(1, -1), tasks=["x", "y"]), "vitlab work m --layers 1,-1 --task x --task y"),
        (
            Options("m", restrict=True, quiet=True, batch_size=3),
            "vitlab work m --restrict",
        ),  # the others change nothing
    ],
)
def test_command_repeats_what_changes_the_result(options: Options, command: str) -> None:
    assert command_of("work", options) == command


def test_short_forms_are_the_overrides_that_they_stand_for() -> None:
    options = TrainOptions("photos", epochs=5, lr=1e-3, batch_size=64, image_size=(32, 48))
    expected = ("train.epochs=5", "optim.lr=0.001", "train.batch_size=64", "data.image_size=[32, 48]")
    assert short_forms(options) == expected
    assert short_forms(TrainOptions("photos")) == ()


@pytest.mark.parametrize(("text", "value"), [("224", 224), ("32,48", (32, 48)), ("32x48", (32, 48))])
def test_size_is_read(text: str, value: object) -> None:
    assert size(text) == value


@pytest.mark.parametrize("read", [size, numbers])
def test_text_that_is_not_a_number_is_an_error(read: object) -> None:
    with pytest.raises(UsageError, match="big"):
        read("big")  # type: ignore[operator]


@pytest.mark.parametrize("options", [TrainOptions, EvaluateOptions])
def test_every_option_has_a_sentence(options: type) -> None:
    assert all(each.opt.help.endswith((".", ".npz")) for each in declared(options))


@dataclass(frozen=True)
class Switched(Inference):
    _: KW_ONLY
    fold: Annotated[bool | None, Opt("Fold it in.")] = None
    overrides: Overrides = ()


def test_command_repeats_what_was_switched_off_and_overrides_of_a_mapping() -> None:
    assert command_of("work", Switched(fold=False)) == "vitlab work --no-fold"
    assert command_of("work", Switched(overrides={"optim.lr": 0.1})) == "vitlab work --set optim.lr=0.1"
