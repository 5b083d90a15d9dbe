"""Messages for users: one-line errors that say what went wrong, where, and how to fix it; and notes."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class InputError(ValueError):
    """Bad input (a flag, a file, a key): the command line prints it and exits with its code."""

    code = 2


class RefusedError(InputError):
    """A server and a node do not match, and retrying would not help: service managers know the exit code (EX_NOPERM)."""

    code = 77


class Note(UserWarning):
    """Something that the user should know but that stops nothing; the command line prints it as one line."""

    event = "note"
    fields: Mapping[str, Any] = {}


def note(message: str, event: str = "note", **fields: Any) -> None:
    """Tell the user something without stopping; programs that read the log find it by its `event` and `fields`."""
    told = Note(message)
    told.event, told.fields = event, fields
    warnings.warn(told, stacklevel=3)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean 'x'?` for a near miss, after the `prefix` that all names share; otherwise the list of names."""
    names = list(known)
    begun = [other for other in names if len(name) > 2 and other.startswith(name)]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or begun
    return f"; did you mean '{prefix}{close[0]}'?" if close else f"; known: {', '.join(sorted(names)) or 'none'}"


def reason(error: BaseException) -> str:
    """Return an error's first meaningful line, or else its kind, and the client it concerns if that is noted."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join([said, *(f"({noted})" for noted in getattr(error, "__notes__", []))])


def lacks_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, on the machine or on a GPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"


@contextmanager
def blaming(whom: str) -> Iterator[None]:
    """Add `whom` an error concerns during the block: to its line if a user can fix it, else as a note below its traceback.

    The error stays the same object, and the first name given, where most is known, stays.
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
    """Make a stranger's text fit for a terminal and a log: one line of limited length without control characters."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:most])


def optional(module: str, extra: str) -> Any:
    """Import a module of an optional extra, or raise one line that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this needs {module.partition('.')[0]}, which is not installed: pip install 'fedrts[{extra}]'") from error
