"""The exceptions that a user can act on; printed without a traceback.

Owns wording and exit codes; knows nothing of what failed. The command line prints `str(error)` and exits with `exit_code`.
"""

import difflib
import re
from collections.abc import Iterable

_QUOTED = 200  # characters of somebody's text in a message
# C0 and C1 but the end of a line, marks of direction (Unicode's Bidi_Control), separators of lines, halves of characters.
_STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class VitlabError(Exception):
    """The base of all: `what` went wrong and in which file, a `hint` what to do, and the `exit_code` of the command line."""

    exit_code = 1

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(what if hint is None else f"{what}\n{hint}")
        self.what = what
        self.hint = hint


class UsageError(VitlabError, ValueError):
    """The call was wrong: a value, a name or a combination that can never work."""

    exit_code = 2


class UnknownName(UsageError, KeyError):
    """A name that is in no table; lists the nearest ones."""

    def __init__(self, kind: str, given: str, known: Iterable[str], *, hint: str | None = None) -> None:
        given = shortened(given)
        self.nearest = nearest_names(given, known)
        guess = f"Nearest: {', '.join(self.nearest)}." if self.nearest else None
        super().__init__(f"unknown {kind} '{given}'", hint=" ".join(filter(None, (guess, hint))) or None)

    __str__ = Exception.__str__  # KeyError would print the repr, quotes and \n included


class FileProblem(VitlabError):
    """A file or folder that cannot be read or written as asked."""


class Unreadable(FileProblem):
    """A file that cannot be read here but may be intact."""


class Unreachable(Unreadable):
    """A store that does not answer: nothing is known of the file, so that it must not count as a bad one."""


class MissingExtra(VitlabError, ImportError):
    """A part of vitlab that only some users need is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed",
            hint=f"Install it with:  pip install 'vitlab[{extra}]'",
        )


def printable(text: str) -> str:
    """Escape control and direction characters, which a terminal would obey.

    Messages quote names and contents of files, which are other people's. Whatever prints or logs them calls this.
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str) -> str:
    """A quotation that fits into a sentence."""
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}… ({len(text):,} characters)"


def require(condition: bool, what: str, hint: str | None = None) -> None:
    """Raise a UsageError that says `what`, unless the condition holds."""
    if not condition:
        raise UsageError(what, hint=hint)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise UnknownName(f"value for {name}:", str(value), choices, hint=f"Allowed: {', '.join(choices)}.")


def amount(number: int, noun: str) -> str:
    """`1 image`, `2,000 images`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def with_article(noun: str) -> str:
    """`a ViT`, `an EfficientNet`: by the first letter."""
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def nearest_names(given: str, known: Iterable[str]) -> list[str]:
    """The three most similar known names, best first, case-insensitive."""
    matcher = difflib.SequenceMatcher(b=given.casefold())
    scored: list[tuple[float, str]] = []
    for name in known:
        matcher.set_seq1(name.casefold())
        scored.append((-matcher.ratio(), name))
    scored.sort(key=lambda pair: pair[0])  # stable: of equally similar names, the one listed first
    return [name for _, name in scored[:3]]
