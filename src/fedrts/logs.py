"""Logs: lines with a level and an event, as text for people or as JSON for programs.

set_up(LogFormat.json, LogLevel.info)
tell(info("round", "round 4 of 50", round=3, bytes=12_340))
tell(warning("lost", "LOST: round 4 goes without client 2", round=4, client=2))
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LOST = "LOST"
"""Lines that begin so are bad news that must not be overlooked: red on a terminal."""


class LogFormat(enum.StrEnum):
    """How lines are written."""

    text = "text"
    json = "json"


class LogLevel(enum.StrEnum):
    """How much a line matters."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"

    @property
    def number(self) -> int:
        """The number of this level in Python's `logging`."""
        return logging.getLevelNamesMapping()[self.name.upper()]

    @staticmethod
    def of(number: int) -> LogLevel:
        """Return the highest level that such a number reaches."""
        return max((level for level in LogLevel if level.number <= number), key=lambda level: level.number, default=LogLevel.debug)


class LogLine(str):
    """A line of text that programs understand too: by the short name of an event, a level, and fields that JSON can hold."""

    event: str
    level: LogLevel
    fields: Mapping[str, Any]

    def __new__(cls, event: str, level: LogLevel, text: str, fields: Mapping[str, Any]) -> LogLine:
        line = super().__new__(cls, text)
        line.event, line.level, line.fields = event, level, fields
        return line


def debug(event: str, text: str, /, **fields: Any) -> LogLine:
    """Return a line with details."""
    return LogLine(event, LogLevel.debug, text, fields)


def info(event: str, text: str, /, **fields: Any) -> LogLine:
    """Return a line about what goes as it should."""
    return LogLine(event, LogLevel.info, text, fields)


def warning(event: str, text: str, /, **fields: Any) -> LogLine:
    """Return a line about what somebody should look at."""
    return LogLine(event, LogLevel.warning, text, fields)


def error(event: str, text: str, /, **fields: Any) -> LogLine:
    """Return a line about what failed."""
    return LogLine(event, LogLevel.error, text, fields)


OutStream = Literal["stdout", "stderr"]

_OURS = logging.getLogger("fedrts")


def tell(text: str, stream: OutStream = "stderr", *, always: bool = False) -> None:
    """Log a line, by default as information; `always`: a result, logged at every level."""
    line = text if isinstance(text, LogLine) else info("told", text)
    if always or _OURS.isEnabledFor(line.level.number):
        _OURS.handle(_OURS.makeRecord(_OURS.name, line.level.number, "", 0, line, (), None, extra={"stream": stream}))


def tells(level: LogLevel) -> bool:
    """Whether lines of this level are logged."""
    return _OURS.isEnabledFor(level.number)


def is_plain() -> bool:
    """Whether this process writes text for people, who may watch a bar grow."""
    return _shown.format_of_lines is LogFormat.text and tells(LogLevel.info)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, event and message, then fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        line = record.msg if isinstance(record.msg, LogLine) else _foreign(record)
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        own = {"time": time, "level": line.level.value, "event": line.event, "message": str(line)}
        return json.dumps(_finite({**own, **line.fields, **own}), default=str)


def _foreign(record: logging.LogRecord) -> LogLine:
    """Return what another package logs as a line of ours; its event is the package's name."""
    trace = {} if not record.exc_info else {"traceback": "".join(traceback.format_exception(*record.exc_info))}
    return LogLine(record.name.partition(".")[0], LogLevel.of(record.levelno), record.getMessage(), trace)


def _finite(content: Any) -> Any:
    """Return content with null for NaN and infinity, which JSON does not know, and with names of fields that it knows."""
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


class _Shown(logging.Handler):
    """Writes lines to this process's output, wherever that goes at the time."""

    format_of_lines = LogFormat.text

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(record, "stream", "stderr")
        try:
            text = self.format(record)
            if self.format_of_lines is LogFormat.text and text.startswith(LOST):
                _print_urgent(text)
            else:
                getattr(sys, name).write(text + "\n")  # in one piece
                getattr(sys, name).flush()
        except BrokenPipeError:  # nobody reads any more: the work goes on, and nothing fails at its end
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, name).fileno())
        except (OSError, ValueError):  # a full disk, or a closed file: there is nowhere to say so
            pass


def _print_urgent(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)


_shown = _Shown()


def set_up(format: LogFormat | None = None, level: LogLevel | None = None) -> None:
    """Make this process write its lines so from now on; None: as before."""
    _OURS.propagate = False
    _OURS.handlers = [_shown]
    if level is not None:
        _OURS.setLevel(level.number)
    if format is None:
        return
    _shown.format_of_lines, programs = format, format is LogFormat.json
    _shown.setFormatter(JsonFormatter() if programs else None)
    root = logging.getLogger()
    root.removeHandler(_shown)
    if programs:  # whatever any package has to say
        root.addHandler(_shown)
    _catch_crashes(programs)


def follow(package: str) -> None:
    """Make another package's logger follow our format and level; below warnings it logs only if all details are wanted."""
    logger = logging.getLogger(package)
    if _shown.format_of_lines is LogFormat.json:
        logger.handlers, logger.propagate = [], True
    if not is_plain() or tells(LogLevel.debug):
        logger.setLevel(LogLevel.debug.number if tells(LogLevel.debug) else max(_OURS.level, LogLevel.warning.number))
        for handler in logger.handlers:
            handler.setLevel(logging.NOTSET)


_hooks: list[Any] = []
"""What Python would do with errors that nobody caught, while we do something else."""


def _catch_crashes(ours: bool) -> None:
    """Log uncaught errors as lines, or leave them to the previous handlers."""
    if ours and not _hooks:
        _hooks[:] = sys.excepthook, threading.excepthook, sys.unraisablehook
        sys.excepthook, threading.excepthook, sys.unraisablehook = _crashed, _thread_crashed, _thread_crashed
    elif not ours and _hooks:
        sys.excepthook, threading.excepthook, sys.unraisablehook = _hooks
        _hooks.clear()


def _crashed(kind: type[BaseException], failure: BaseException, trace: Any) -> None:
    words = "".join(traceback.format_exception_only(failure)).strip()
    tell(error("error", words, traceback="".join(traceback.format_exception(kind, failure, trace))))


def _thread_crashed(failed: Any) -> None:
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        _crashed(failed.exc_type, failed.exc_value, failed.exc_traceback)
