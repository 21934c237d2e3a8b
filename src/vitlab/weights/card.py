"""The model card: what a bundle is, where it comes from, how good it is."""

from collections.abc import Mapping, Sequence

from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec


def write_card(
    *,
    title: str,
    spec: ModelSpec,
    data: str,
    command: str,
    metrics: Mapping[str, str],
    seed: int = 0,
    licence: str = "that of the source",
) -> str:
    """Write the card; `metrics` maps a name to its value with interval."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in metrics.items())
    return f"""# {title}

| what | |
|---|---|
| model | {format_name(spec)}, {count_params(spec):,} parameters, {count_macs(spec) / 1e6:,.1f} M multiply-adds per image |
| image | {spec.image_size[0]}x{spec.image_size[1]} pixels, {spec.in_channels} channel(s) |
| data | {data} |
| command | `{command}` |
| seed | {seed} |
{rows}
| licence | {licence} |

Load it with `vitlab.load("this folder")`: preprocessing and labels come along.
"""


def with_measurements(card: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Append later measurements: name, value with interval, command."""
    if not rows:
        return card
    lines = [f"| {_cell(name)} | {_cell(value)} | `{_cell(command)}` |" for name, value, command in rows]
    return "\n".join([card.rstrip(), "", "## Measured", "", "| what | value | command |", "|---|---|---|", *lines, ""])


def _cell(text: str) -> str:
    """A bar or a line break in a name must not end the cell."""
    return " ".join(text.replace("|", "\\|").split())
