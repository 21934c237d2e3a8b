"""The `vitlab` command of a piece of work, to be pasted into a shell."""

import shlex
from collections.abc import Mapping


def command_line(verb: str, *args: object, options: Mapping[str, object] | None = None) -> str:
    """`vitlab VERB ARGS --option VALUE`, quoted.

    Options that are None, False or an empty list are left out: callers pass None for what has its default value. Underscores
    become hyphens (`label_map` is `--label-map`), and a list repeats its option.
    """
    words = ["vitlab", *verb.split(), *map(str, args)]
    for name, value in (options or {}).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (flag, str(item))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return shlex.join(words)
