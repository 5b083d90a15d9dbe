"""The command line: one file per group of commands. Commands import heavy modules when called, so that `--help` answers at once."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Annotated, TextIO

import typer

import fedrts
from fedrts import logs

# Importing a file registers its commands; `--help` lists them in this order.
# isort: off
from fedrts.cli import run  # noqa: F401
from fedrts.cli import compare  # noqa: F401
from fedrts.cli import reproduce  # noqa: F401
from fedrts.cli import folder  # noqa: F401
from fedrts.cli import bench  # noqa: F401
from fedrts.cli import report  # noqa: F401
from fedrts.cli import watch  # noqa: F401
from fedrts.cli import plan  # noqa: F401
from fedrts.cli import cost  # noqa: F401
from fedrts.cli import regret  # noqa: F401
from fedrts.cli import catalogue  # noqa: F401
from fedrts.cli import deployment  # noqa: F401
from fedrts.cli import audit  # noqa: F401
# isort: on

from fedrts.cli.app import app
from fedrts.errors import InputError, Note, lacks_memory, reason

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # what typer raises for every mistake on the command line


def main() -> None:
    """Run the command line. Exit codes: 0 done; 1 some of several runs failed; 2 bad input; 77 refused by a server; 130 interrupted."""
    logs.set_up(logs.LogFormat.text, logs.LogLevel.info)
    warnings.showwarning = _show_warning
    try:
        sys.exit(app(prog_name="fedrts", standalone_mode=False) or 0)
    except InputError as error:
        _fail(str(error))
        sys.exit(error.code)
    except _UsageError as error:
        if message := " ".join(error.format_message().split()):  # type: ignore[attr-defined]
            message = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", message)  # said by two libraries
            context = getattr(error, "ctx", None)
            if context is not None and message.startswith(("No such", "Got unexpected")) and "Did you mean" not in message:
                message = f"{message.removesuffix('.')}; `{context.command_path} --help` says what there is"
            _fail(message)
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        _fail(f"there is not enough memory ({reason(error)}): lower what makes it so large")
    sys.exit(2)


def _fail(words: str) -> None:
    logs.tell(logs.error("error", f"error: {words}"))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    if isinstance(message, Note):
        logs.tell(logs.warning(message.event, f"note: {message}", **message.fields))
    else:
        logs.tell(logs.warning("warning", warnings.formatwarning(message, category, filename, lineno).rstrip()))


def _version(wanted: bool) -> None:
    if wanted:
        print(fedrts.__version__)
        raise typer.Exit


@app.callback()
def fedrts_command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Federated learning of sparse models: FedRTS and the methods it is compared with."""
