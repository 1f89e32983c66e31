"""Log lines that appear once a process, so that a client that repeats itself does not fill the log."""

from __future__ import annotations

import logging

_MOST = 1000
"""Different lines that are logged; clients choose some of their words."""
_logged: set[str] = set()


def log_once(logger: logging.Logger, line: str) -> None:
    """Log a warning unless the same line was logged before. Any thread may call this."""
    if line not in _logged and len(_logged) < _MOST:
        _logged.add(line)
        logger.warning(line)
