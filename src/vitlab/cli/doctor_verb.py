"""`vitlab doctor`."""

import dataclasses

from vitlab.cli.options import Debug, Json, echo, print_json
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
        for finding in checkup.findings:
            mark = {"ok": "ok", "note": "--", "problem": "!!"}[finding.state]
            echo(f"  {mark}  {finding.topic:<14} {finding.text}")
    if not checkup.healthy:
        raise VitlabError("something is wrong with this installation", hint="Every line marked !! says how to fix it.")
