"""Dashboards of others, for who asks for them: TensorBoard and Weights & Biases. metrics.jsonl has the same numbers always.

Their libraries write their own files, in the run's folder: the one place where `core/fsio.py` does not. What they have written
is theirs to read; vitlab never does.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.core import config
from vitlab.core.dist import World
from vitlab.core.errors import MissingExtra, UsageError, VitlabError
from vitlab.training.recipe import Recipe, recipe_to_dict

Track = Callable[[int, Mapping[str, float]], None]  # the step, and what was measured at it


def require_trackers(names: Sequence[Literal["tensorboard", "wandb"]]) -> None:
    """An error, before any work, where a dashboard cannot be written to."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, name, f"train.log = {name}")
    if "wandb" in names:
        _require_login()


def _require_login() -> None:
    """Looks for a key where wandb itself does, without a word, a question or the network."""
    import wandb  # pyright: ignore[reportMissingImports]
    import wandb.errors  # pyright: ignore[reportMissingImports]

    try:
        # Were it not silent, the login would greet, and ask the server whom.
        settings: Any = wandb.setup(wandb.Settings(silent=True)).settings
        stays_here = settings.mode in ("offline", "dryrun", "disabled")
        known = stays_here or wandb.run is not None or wandb.login(prompt=False, verify=False)
    except (wandb.errors.Error, ValueError) as error:  # a key that cannot be one; a mode that there is not
        raise UsageError(f"train.log = wandb, but Weights & Biases refuses its settings: {error}") from error
    if not known:
        raise UsageError(
            "train.log = wandb, but Weights & Biases does not know who you are",
            hint="Call `wandb login` first, or set WANDB_MODE=offline.",
        )


@contextlib.contextmanager
def tracking(recipe: Recipe, folder: Path, step: int, world: World) -> Generator[Track]:
    """Yield `track(step, metrics)`, which writes to every dashboard that the recipe asks for. `step` is the last one done."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with contextlib.ExitStack() as stack:
        names = recipe.train.log if world.is_main else ()
        sinks = [stack.enter_context(makers[name](recipe, folder, step)) for name in names]

        def track(step: int, metrics: Mapping[str, float]) -> None:
            for write in sinks:
                write(step, metrics)

        yield track


@contextlib.contextmanager
def _tensorboard(_: Recipe, folder: Path, step: int) -> Generator[Track]:
    from torch.utils.tensorboard import SummaryWriter

    # What a crash undid is taken out of the curves: TensorBoard forgets the steps from here on.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def track(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    try:
        yield track
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(recipe: Recipe, folder: Path, _: int) -> Generator[Track]:
    import wandb  # pyright: ignore[reportMissingImports]
    import wandb.errors  # pyright: ignore[reportMissingImports]

    # A run that is resumed goes on under the same id, and another run in a folder of the same name has another.
    began = (folder / "config.toml").stat().st_mtime_ns
    try:
        record: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitlab"),
            name=recipe.title,
            id=config.fingerprint({"folder": str(folder.absolute()), "began": began}),
            resume="allow",
            dir=str(folder),
            config=recipe_to_dict(recipe),
            settings=wandb.Settings(silent=True, console="off"),  # standard output belongs to results
        )
    except wandb.errors.Error as error:
        raise VitlabError(f"Weights & Biases did not start: {error}", hint="Or set WANDB_MODE=offline.") from error
    code = 1
    try:
        yield lambda step, numbers: record.log(dict(numbers), step=step)
        code = 0
    finally:
        record.finish(exit_code=code)
