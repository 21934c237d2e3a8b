"""`vitlab plan`."""

from typing import Any

from vitlab.cli.options import show, verb
from vitlab.options.training_options import PlanOptions


@verb(PlanOptions)
def run(*, as_json: bool, debug: bool, **given: Any) -> None:
    """Estimate a run before it starts: parameters, compute, memory, speed on this machine, hours, cost."""
    from vitlab.runs.training.planning import plan

    found = plan(**given)
    show(found, [f"{label:<14} {text}" for label, text in found.lines()], as_json=as_json)
