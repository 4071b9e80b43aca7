"""One JSON object a line, about what happened and never about what was in it."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Any

LEVELS = ("debug", "info", "warning", "error")


class Log:
    """Writes events.

    Args:
        level: of the least important ones that are written.
        stream: where they go; standard error by default.
    """

    def __init__(self, level: str = "info", stream: IO[str] | None = None) -> None:
        self.level, self._stream = LEVELS.index(level), stream

    def write(self, level: str, event: str, **fields: Any) -> None:
        """An event with its fields."""
        if LEVELS.index(level) < self.level:
            return
        line = {"time": round(time.time(), 3), "level": level, "event": event, **fields}
        stream = self._stream or sys.stderr
        stream.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")
        stream.flush()


class UvicornHandler(logging.Handler):
    """What uvicorn says, in the same form. Of an exception only its type and place: its text may hold a key or more."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "debug"
        fields: dict[str, Any] = {"message": str(record.msg).strip()}
        if record.exc_info and record.exc_info[1] is not None:
            error, trace = record.exc_info[1], record.exc_info[2]
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            fields["error"] = type(error).__name__
            if trace is not None:
                fields["at"] = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        self._log.write(level, "uvicorn", **fields)
