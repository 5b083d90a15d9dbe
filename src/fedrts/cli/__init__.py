"""The command line: one file per group of commands. Commands import heavy modules when called, so that `--help` answers at once."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Annotated, TextIO

import typer

import fedrts

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
    warnings.showwarning = _show_warning
    try:
        sys.exit(app(prog_name="fedrts", standalone_mode=False) or 0)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
    except _UsageError as error:
        if message := " ".join(error.format_message().split()):  # type: ignore[attr-defined]
            message = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", message)  # said by two libraries
            context = getattr(error, "ctx", None)
            if context is not None and message.startswith(("No such", "Got unexpected")) and "Did you mean" not in message:
                message = f"{message.removesuffix('.')}; `{context.command_path} --help` says what there is"
            print(f"error: {message}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        print(f"error: there is not enough memory ({reason(error)}): lower what makes it so large", file=sys.stderr)
    sys.exit(2)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    text = f"note: {message}" if issubclass(category, Note) else warnings.formatwarning(message, category, filename, lineno).rstrip()
    print(text, file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(fedrts.__version__)
        raise typer.Exit


@app.callback()
def fedrts_command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Federated learning of sparse models: FedRTS and what it is compared with."""
