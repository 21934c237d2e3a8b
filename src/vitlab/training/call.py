"""A call of `vitlab train`, checked as far as the call alone allows."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.core.runtime import require_threads
from vitlab.options.option import arguments_of, command_of
from vitlab.options.training_options import TrainOptions, short_forms
from vitlab.training.recipe import read_recipe

IN_PYTHON = "python:"  # before the name of data that were given as an object: no name can open them again


def name_of(data: Any) -> str | None:
    """What data are called that were named, or given as an object of Python's."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data)
    return f"{IN_PYTHON}{getattr(data, 'name', type(data).__name__)}"


@dataclasses.dataclass(frozen=True)
class TrainCall(TrainOptions):
    """A call of `vitlab train`, checked as far as the call alone allows."""

    def __post_init__(self) -> None:
        require_threads(self.threads)
        if self.data is None and self.resume is None and self.source is None:
            raise UsageError(
                "give the data to train on, a --recipe that names some, or --resume with the folder of a run"
            )
        if self.seeds < 1:
            raise UsageError(f"--seeds must be at least 1, not {self.seeds}")
        if self.sweep is not None and self.seeds > 1:
            raise UsageError("--sweep makes several runs of its own; leave --seeds out")
        if self.resume is not None and (self.recipe or self.init or self.model or self.seed or self.out is not None):
            raise UsageError(
                "--resume continues with the run's own recipe, model, start weights, seed and folder; leave yours out"
            )

    @property
    def source(self) -> str | None:
        """The data that was named, else what the recipe was written for."""
        if self.data is not None:
            return name_of(self.data)
        data = {} if self.recipe is None else read_recipe(self.recipe).get("data")
        source = data.get("source") if isinstance(data, Mapping) else None
        return source if isinstance(source, str) else None

    @property
    def in_python(self) -> Any:
        """The data themselves, where they are not named but given."""
        return None if isinstance(self.data, str | Path) else self.data

    @property
    def start(self) -> str | None:
        """The start weights, as they were named."""
        return None if self.init is None else str(self.init)

    @property
    def changes(self) -> tuple[str, ...]:
        """Every override, the short forms first: `--set` is the more exact, and comes last."""
        return (*short_forms(self), *config.override_texts(self.overrides))

    def data_words(self) -> list[str]:
        """The words of a command that name the same data: the call without what is specific to one training.

        None for data that were given in Python.
        """
        if self.in_python is not None:
            return []
        named = TrainCall(self.source, columns=self.columns, min_images=self.min_images)
        arguments, flags = arguments_of(named)
        return [*map(str, arguments), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]

    def command(self, folder: Path | None) -> str:
        """The call as it can be pasted; without a folder, one that takes the next free name."""
        return command_of("train", self, data=self.source, out=folder, overrides=config.override_texts(self.overrides))
