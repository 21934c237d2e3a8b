"""`vitlab recipes list | show`."""

import math
from typing import Annotated, Any, cast

import typer

from vitlab.cli.options import Debug, Json, Verb, echo, print_json
from vitlab.core.errors import UnknownName

app = typer.Typer(
    name="recipes", help="List and show training recipes, as published and in small.", no_args_is_help=True
)


@app.command("list", cls=Verb, epilog="Example: [bold]vitlab recipes list 'paper-*'[/bold]")
def show_list(
    pattern: Annotated[str, typer.Argument(help="A shell pattern, such as 'paper-*'.")] = "*",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The recipes that ship: model, data, length, batch, and the top-1 to expect, in percent."""
    from vitlab.models.names import format_name
    from vitlab.training.recipe import list_recipes
    from vitlab.training.recipe_book import show_recipe

    names = list_recipes(pattern)
    if not names:
        raise UnknownName("recipe pattern", pattern, list_recipes(), hint="`vitlab recipes list` lists all.")
    shown = [show_recipe(name) for name in names]
    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "model": format_name(each.recipe.model),
            "data": each.recipe.data.source,
            "length": each.length,
            "batch_size": each.recipe.train.batch_size,
            "expected_top1": None if each.recipe.expect is None else each.recipe.expect.test_top1,
            "after": "" if each.recipe.expect is None else each.recipe.expect.after,
            "about": each.about,
        }
        for each in shown
    ]
    if as_json:
        print_json(rows)
        return
    name_width, model_width = (max(len(row[key]) for row in rows) + 2 for key in ("name", "model"))
    echo(f"{'recipe':<{name_width}}{'model':<{model_width}}{'data':<13}{'length':>13}{'batch':>7}  expect")
    for row in rows:
        top1 = "-" if row["expected_top1"] is None else f"{100 * row['expected_top1']:.1f}"
        after = f" after {row['after']}" if row["after"] else ""
        data = row["data"].partition(":")[0]  # the settings of a synthetic set are for `show`
        echo(
            f"{row['name']:<{name_width}}{row['model']:<{model_width}}{data:<13}{row['length']:>13}"
            f"{row['batch_size']:>7}  {top1}{after}"
        )


@app.command("show", cls=Verb, epilog="Example: [bold]vitlab recipes show cifar10-plain-vit[/bold]")
def show_one(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `vitlab recipes list`, or a file.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """One recipe as TOML, every key written out, with the command that runs it. Its data need not be here."""
    from vitlab.training.recipe_book import show_recipe

    shown = show_recipe(name)
    if as_json:
        facts = {key: getattr(shown, key) for key in ("name", "about", "command", "images", "steps", "exaflops")}
        print_json({**facts, "recipe": _spelled_out(shown.table())})
    else:
        echo(shown.toml(), end="")


def _spelled_out(value: Any) -> Any:
    """JSON has no infinity: no limit is the text "inf"."""
    if isinstance(value, dict):
        return {key: _spelled_out(item) for key, item in cast(dict[str, Any], value).items()}
    return str(value) if value == math.inf else value
