"""`vitlab train`."""

from typing import Any

from vitlab.cli.options import PrintConfig, echo, print_json, show, show_planned, verb
from vitlab.core import config
from vitlab.options.training_options import TrainOptions


@verb(TrainOptions, print_config=PrintConfig)
def run(*, print_config: bool, as_json: bool, debug: bool, **given: Any) -> None:
    """Train a classifier on your images: audit, split, train, test, explain, report."""
    from vitlab.runs.training.training_run import resolved_config, train

    if print_config:
        table = resolved_config(**given)
        print_json(table) if as_json else echo(config.dump_toml(table), end="")
        return
    result = train(**given)
    if not show_planned(result, as_json=as_json):
        show(result.to_json(), result.sentences(), as_json=as_json)
