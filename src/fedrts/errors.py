"""Messages for users: one-line errors that say what went wrong, where, and how to fix it; and notes."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class InputError(ValueError):
    """Bad input (a flag, a file, a key): the command line prints it and exits with its code."""

    code = 2


class RefusedError(InputError):
    """A server and a node do not go together, and trying again would not help: service managers know the code (EX_NOPERM)."""

    code = 77


class Note(UserWarning):
    """Something the user should know that stops nothing; the command line prints it as one line."""


def note(message: str) -> None:
    """Tell the user without stopping."""
    warnings.warn(message, Note, stacklevel=3)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` for a near miss, after the `prefix` that all names have; otherwise the list of what there is."""
    names = list(known)
    begun = [other for other in names if len(name) > 2 and other.startswith(name)]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or begun
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(sorted(names)) or 'none'}"


def reason(error: BaseException) -> str:
    """What an error says in its first line that says something, otherwise its kind; and whom it happened to, where that is noted."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join([said, *(f"({noted})" for noted in getattr(error, "__notes__", []))])


def lacks_memory(error: BaseException) -> bool:
    """Is it memory, of the machine or of a GPU, that there is too little of?"""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"


@contextmanager
def blaming(whom: str) -> Iterator[None]:
    """An error inside says `whom` it happened to: in its line where a user can mend it, else in a note below its traceback.

    It stays the same error; who is named first, where most is known, stays named.
    """
    try:
        yield
    except Exception as error:
        if vars(error).setdefault("whom", whom) is whom:
            if isinstance(error, InputError):
                error.args = (f"{whom}: {error}", *error.args[1:])
            else:
                error.add_note(whom)
        raise


def printable(text: object, most: int = 300) -> str:
    """What a stranger says, fit for a terminal and a log: one line without control characters, at most so long."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:most])


def optional(module: str, extra: str) -> Any:
    """A module that comes with an optional extra of the package, or one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this needs {module.partition('.')[0]}, which is not installed: pip install 'fedrts[{extra}]'") from error
