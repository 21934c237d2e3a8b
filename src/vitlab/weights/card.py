"""The model card: what a bundle is, where it comes from, how good it is."""

from collections.abc import Mapping, Sequence

from vitlab.core.command import command_line
from vitlab.core.errors import amount
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec

LICENCE, START = "licence", "start weights"  # rows that a later card takes over
_COMMAND = "| command | "


def write_card(
    *,
    title: str,
    spec: ModelSpec,
    data: str,
    command: str,
    metrics: Mapping[str, str],
    seed: int = 0,
    start: str | None = None,
    licence: str = "that of the source",
) -> str:
    """Write the card; `metrics` maps a name to its value with interval, `start` names the weights it came from."""
    metrics = metrics if start is None else {START: _cell(start), **metrics}
    rows = "\n".join(f"| {name} | {value} |" for name, value in metrics.items())
    return f"""# {title}

| what | |
|---|---|
| model | {format_name(spec)}, {count_params(spec):,} parameters, {count_macs(spec) / 1e6:,.1f} M multiply-adds per image |
| image | {spec.image_size[0]}x{spec.image_size[1]} pixels, {amount(spec.in_channels, "channel")} |
| data | {data} |
{_COMMAND}`{_cell(command)}` |
| seed | {seed} |
{rows}
| {LICENCE} | {_cell(licence)} |

Load it with `vitlab.load("this folder")`: preprocessing and labels come along.
"""


def convert_command(source: object) -> str:
    """The command of a card whose weights were read, and not yet written anywhere."""
    return command_line("convert", source, "OUT")


def with_command(card: str, command: str) -> str:
    """Replace the command by the one that was given."""
    row = f"{_COMMAND}`{_cell(command)}` |"
    return "\n".join(row if line.startswith(_COMMAND) else line for line in card.split("\n"))


def card_row(card: str, name: str) -> str | None:
    """What the card says under this name; None where it has no such row."""
    start = f"| {name} | "
    found = (line for line in card.splitlines() if line.startswith(start) and line.endswith(" |"))
    return next((line.removeprefix(start).removesuffix(" |").replace("\\|", "|") for line in found), None)


def card_title(card: str) -> str:
    return card.partition("\n")[0].lstrip("# ").strip()


def with_measurements(card: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Append later measurements: name, value with interval, command."""
    if not rows:
        return card
    lines = [f"| {_cell(name)} | {_cell(value)} | `{_cell(command)}` |" for name, value, command in rows]
    return "\n".join([card.rstrip(), "", "## Measured", "", "| what | value | command |", "|---|---|---|", *lines, ""])


def _cell(text: str) -> str:
    """A bar or a line break in a name must not end the cell."""
    return " ".join(text.replace("|", "\\|").split())
