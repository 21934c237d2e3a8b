"""The page of VTAB-1k: tasks by group, their means, and what is missing."""

import dataclasses
from collections.abc import Mapping, Sequence

from vitlab.core.command import command_line
from vitlab.core.environment import package_version
from vitlab.report.page import Bar, Bars, Report, Section, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabFacts:
    """Accuracies as fractions; a mean is None where one of its tasks is missing."""

    model: str
    command: str
    records: str
    groups: Mapping[str, Sequence[str]]
    tasks: Mapping[str, float]
    means: Mapping[str, float | None]
    mean: float | None
    missing: Mapping[str, str]
    chosen: Sequence[str]
    seeds: Sequence[int]
    seconds: float


def build_vtab_page(facts: VtabFacts) -> Report:
    total = sum(map(len, facts.groups.values()))
    done = f"{len(facts.tasks)} of {total} tasks measured"
    often = "once" if len(facts.seeds) == 1 else f"{len(facts.seeds)} times"
    sections: list[Section] = [
        _group(facts, group) for group, names in facts.groups.items() if {*names} & {*facts.tasks}
    ]
    if facts.missing:
        rows = [[name, why.splitlines()[0]] for name, why in facts.missing.items()]
        caption = "A mean is given only where no task of it is missing. vitlab data list says which files to put where."
        sections.append(Table("Missing", caption, ["task", "why"], rows))
    return Report(
        title=f"{facts.model} on VTAB-1k",
        headline=done if facts.mean is None else f"{facts.mean:.1%}, the mean of all {total} tasks",
        subline=f"Fine-tuned {often} to a thousand images each, and tested on the whole test parts",
        facts=[
            ("model", facts.model),
            ("command", facts.command),
            ("seeds", ", ".join(map(str, facts.seeds))),
            *([("chosen by the sweep", " ".join(facts.chosen))] if facts.chosen else []),
            ("beside the paper", command_line("study report", "table9", options={"records": facts.records})),
            ("time", f"{facts.seconds:.0f} s in the last call"),
        ],
        sections=sections,
        footer=f"vitlab {package_version('vitlab')} · every number is a file in {facts.records}",
    )


def _group(facts: VtabFacts, group: str) -> Bars:
    names, mean = facts.groups[group], facts.means[group]
    done = [name for name in names if name in facts.tasks]
    caption = f"{len(done)} of {len(names)} tasks, so no mean." if mean is None else f"The mean is {mean:.1%}."
    bars = [Bar(name, facts.tasks[name], f"{facts.tasks[name]:.1%}") for name in done]
    return Bars(group.capitalize(), caption, bars)
