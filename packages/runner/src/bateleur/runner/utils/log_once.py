"""Log lines that appear once per process, so that repeated requests do not fill the log."""

import logging

_MAX_LINES = 1000  # maximum number of different lines, because clients choose some of their words
_logged: set[str] = set()


def log_once(logger: logging.Logger, line: str) -> None:
    """Log a warning unless the same line was logged before. Any thread may call this."""
    if line not in _logged and len(_logged) < _MAX_LINES:
        _logged.add(line)
        logger.warning(line)
