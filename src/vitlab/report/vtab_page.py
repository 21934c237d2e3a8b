"""The page of VTAB-1k: tasks by group, their means, and what is missing."""

from collections.abc import Sequence

from vitlab.core.command import command_line
from vitlab.evaluation.vtab import VtabResult, task_groups
from vitlab.report.page import Bar, Bars, Report, Section, Snippets, Table, percent


def build_vtab_page(result: VtabResult, model: str, command: str) -> Report:
    """The page of every task that was run."""
    groups = task_groups()
    total = sum(map(len, groups.values()))
    done = f"{len(result.tasks)} of {total} tasks measured"
    often = "once" if len(result.seeds) == 1 else f"{len(result.seeds)} times"
    sections: list[Section] = [
        _group(result, group, names) for group, names in groups.items() if {*names} & {*result.tasks}
    ]
    if result.missing:
        rows = [[name, why.splitlines()[0]] for name, why in result.missing.items()]
        caption = "A mean is given only where no task of it is missing. vitlab data list says which files to put where."
        sections.append(Table("Missing", caption, ["task", "why"], rows))
    return Report(
        title=f"{model} on VTAB-1k",
        number="" if result.mean is None else percent(result.mean),
        headline=done if result.mean is None else f"the mean of all {total} tasks",
        subline=f"Fine-tuned {often} to a thousand images each, and tested on the whole test parts",
        stats=[
            ("tasks", f"{len(result.tasks)} of {total}"),
            *((group, "no mean" if mean is None else percent(mean)) for group, mean in result.groups.items()),
            ("last call", f"{result.seconds:.0f} s"),
        ],
        facts=[
            ("model", model),
            ("seeds", ", ".join(map(str, result.seeds))),
            *([("chosen by the sweep", " ".join(result.chosen))] if result.chosen else []),
            ("beside the paper", command_line("study report", "table9", options={"records": result.records})),
        ],
        sections=[*sections, Snippets("Repeat it", "", [("On the command line", command)])],
        footer=f"every number is a file in {result.records}",
    )


def _group(result: VtabResult, group: str, names: Sequence[str]) -> Bars:
    mean = result.groups[group]
    done = [name for name in names if name in result.tasks]
    caption = f"{len(done)} of {len(names)} tasks, so no mean." if mean is None else f"The mean is {percent(mean)}."
    bars = [Bar(name, result.tasks[name], percent(result.tasks[name])) for name in done]
    return Bars(group.capitalize(), caption, bars)
