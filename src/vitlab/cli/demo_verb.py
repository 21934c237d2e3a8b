"""`vitlab demo`."""

from typing import Any

from vitlab.cli.options import PrintConfig, echo, print_json, show, show_planned, verb
from vitlab.core import config
from vitlab.options.training_options import DemoOptions


@verb(DemoOptions, print_config=PrintConfig)
def run(*, print_config: bool, as_json: bool, debug: bool, **given: Any) -> None:
    """Pre-train on fractals, transfer to real digits, test, explain, report: two minutes, no download."""
    from vitlab.pipelines import digits_demo

    if print_config:
        table = digits_demo.demo_config(given["overrides"], given["seed"])
        print_json(table) if as_json else echo(config.dump_toml(table), end="")
        return
    result = digits_demo.demo(**given)
    if not show_planned(result, as_json=as_json):
        show(result.to_json(), result.sentences(), as_json=as_json)
