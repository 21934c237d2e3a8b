"""`vitlab doctor`."""

import dataclasses

from vitlab.cli.options import Debug, Json, echo, print_json, terminal_width, two_columns
from vitlab.core.errors import VitlabError


def run(as_json: Json = False, debug: Debug = False) -> None:
    """Check this installation and what it can do here. Paste the answer into bug reports."""
    from vitlab.runs.checkup import doctor

    checkup = doctor()
    if as_json:
        print_json({"healthy": checkup.healthy, **dataclasses.asdict(checkup)})
    else:
        machine = checkup.machine
        echo(f"vitlab {machine['vitlab']} · Python {machine['python']} · {machine['system']}")
        marks = {"ok": "ok", "note": "--", "problem": "!!"}
        rows = [(f"  {marks[finding.state]}  {finding.topic}", finding.text) for finding in checkup.findings]
        for line in two_columns(rows, terminal_width()):
            echo(line)
    if not checkup.healthy:
        raise VitlabError("something is wrong with this installation", hint="Every line marked !! says how to fix it.")
