"""Dashboards of others, for who asks: TensorBoard, Weights & Biases, MLflow. metrics.jsonl has the same numbers always.

Their libraries write their own files, in the run's folder: the one place where `core/fsio.py` does not. What they have written
is theirs to read; vitlab never does.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config
from vitlab.core.dist import World
from vitlab.core.errors import MissingExtra, UsageError, VitlabError
from vitlab.training.recipe import Recipe, Tracker, recipe_to_dict

_TOGETHER = 500  # numbers sent to MLflow at once; it takes a thousand
_PAUSE_S = 5.0  # after which fewer are sent: a server need not be asked at every step
_LONGEST = 500  # characters of a parameter, the least that any version of MLflow takes
Track = Callable[[int, Mapping[str, float]], None]  # the step, and what was measured at it


def require_trackers(names: Sequence[Tracker]) -> None:
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
            "train.log = wandb, but you are not logged in to Weights & Biases",
            hint="Call `wandb login` first, or set WANDB_MODE=offline.",
        )


@contextlib.contextmanager
def tracking(recipe: Recipe, folder: Path, step: int, world: World) -> Generator[Track]:
    """Yield `track(step, metrics)`, which writes to every dashboard that the recipe asks for. `step` is the last one done."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
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

    try:
        record: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitlab"),
            name=recipe.title,
            id=_identity(folder),
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


def _identity(folder: Path) -> str:
    """A run that is resumed continues under the same id, and another run in a folder of the same name has another."""
    began = (folder / "config.toml").stat().st_mtime_ns
    return config.fingerprint({"folder": str(folder.absolute()), "began": began})


@contextlib.contextmanager
def _mlflow(recipe: Recipe, folder: Path, _: int) -> Generator[Track]:
    """To the server of MLFLOW_TRACKING_URI, else to files in the run's folder."""
    import mlflow  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

    # New versions want an explicit file address, and a database would need more packages than all of vitlab.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    here = (folder.absolute() / "mlflow").as_uri()
    waiting = list[Any]()
    try:
        client: Any = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))
        record = _mlflow_run(client, recipe, _identity(folder))
    except MlflowException as error:
        raise VitlabError(f"MLflow did not start: {error}", hint="Is MLFLOW_TRACKING_URI what you mean?") from error
    sent = time.monotonic()

    def send() -> None:
        nonlocal sent
        sent = time.monotonic()
        with contextlib.suppress(MlflowException):  # a server that is away: training is worth more than its curves
            while waiting:
                client.log_batch(record, metrics=waiting[:_TOGETHER])
                del waiting[:_TOGETHER]

    def track(step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        waiting.extend(Metric(name, float(value), now, step) for name, value in numbers.items())
        if len(waiting) >= _TOGETHER or time.monotonic() - sent > _PAUSE_S:
            send()

    status = "FAILED"
    try:
        yield track
        status = "FINISHED"
    finally:
        send()
        with contextlib.suppress(MlflowException):
            client.set_terminated(record, status)


def _mlflow_run(client: Any, recipe: Recipe, identity: str) -> str:
    """The id of the run there: the same one where it is resumed."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vitlab")
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    begun = client.search_runs([experiment], f"tags.`vitlab.run` = '{identity}'", max_results=1)
    if begun:
        client.update_run(begun[0].info.run_id, "RUNNING")
        return begun[0].info.run_id
    record = client.create_run(experiment, run_name=recipe.title, tags={"vitlab.run": identity}).info.run_id
    for key, value in config.flat(recipe_to_dict(recipe)).items():
        client.log_param(record, key, str(value)[:_LONGEST])
    return record
