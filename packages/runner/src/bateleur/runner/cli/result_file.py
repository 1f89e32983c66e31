"""Writes results of a file of requests, one JSON object per line, when each request ends.

An interrupted run can be resumed: it leaves complete lines, in the order in which requests ended, and at most one
incomplete line. At the end the lines are sorted into the order of the requests. Memory: 8 bytes per request line, the
offset of its result.
"""

import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from bateleur.runner.cli.console import name_in_errors
from bateleur.runner.cli.line_formats import RESULT_PREFIXES, parse_result
from bateleur.runner.cli.request_file import RequestFile

_NONE = -1


def require_other_file(path: Path | None, source: str) -> None:
    """Raise ValueError if the file for results, None for stdout, is the file of requests (`source`, - for stdin)."""
    if source != "-" and path is not None and path.exists() and path.samefile(source):
        raise ValueError(f"--output is {path}; that is the prompt file")


class ResultFile:
    """Writes results to a file, which the constructor opens. Only results in a regular file can be resumed and sorted.

    path: the file; None for stdout. source: file of requests. overwrite: discard the file's content when the first
    result is written. Raises OSError if the file cannot be opened, and ValueError if it is the file of requests.
    """

    def __init__(self, path: Path | None, source: str, *, overwrite: bool) -> None:
        require_other_file(path, source)
        self._overwrite = overwrite
        self._path = path or Path("stdout")  # for messages; only a regular file is opened again
        self._file: IO[bytes] = sys.stdout.buffer if path is None else path.open("ab", buffering=0)
        self._regular = path is not None and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self.folder = self._path.resolve().parent if self._regular else None  # where temporary files may be put
        self._starts = np.empty(0, np.int64)  # by request line: offset of its result; _NONE without one
        self._end, self._superseded = 0, False  # length of the results, and whether later ones replace some of them

    def close(self) -> None:
        """Close the file, unless it is stdout."""
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def resume(self, requests: RequestFile) -> int:
        """Find the results of an earlier run, and return the number of those without errors. Failed requests run again.

        Raises ValueError if another run writes to the file, a line is not a result, or a request has changed.
        """
        self._starts = np.full(requests.num_lines + 1, _NONE, np.int64)
        if not self._regular:
            return 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output is {self._path}; another run is writing to it") from error
        if self._overwrite or not os.fstat(self._file.fileno()).st_size:
            return 0
        found = self._read()
        kept = self._starts != _NONE
        expected = np.zeros_like(found)
        for request in requests if kept.any() else ():
            expected[request.line] = int(request.digest or "0", 16)
        if len(wrong := np.flatnonzero(kept & (found != expected))):
            raise self._changed(int(wrong[0]))
        return int(kept.sum())

    def _read(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Find the offsets of results in the file, and return request digests by line; 0 if none or failed."""
        digests = np.zeros(len(self._starts), np.uint64)
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and any(each.startswith(raw[: len(each)]) for each in RESULT_PREFIXES):
                    break  # the earlier run was killed while it wrote this line
                try:
                    line, digest = parse_result(raw)
                    digest_or_0 = np.uint64(digest or 0)
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                    raise self._refusal(f"line {number} is not a result of this command") from error
                if not 0 < line < len(digests):
                    raise self._changed(line)
                self._superseded |= digest is None or bool(self._starts[line] != _NONE)
                self._starts[line] = _NONE if digest is None else self._end
                digests[line] = digest_or_0
                self._end += len(raw)
        return digests

    def _changed(self, line: int) -> ValueError:
        return self._refusal(f"result for line {line} has another prompt, model or parameters")

    def _refusal(self, reason: str) -> ValueError:
        fix = "Choose another file, or replace it with --overwrite"
        return ValueError(f"--output is {self._path}; its {reason}. {fix}")

    def has_result(self, line: int) -> bool:
        """Whether the request of this line has a result."""
        return bool(self._starts[line] != _NONE)

    def write(self, line: int, record: Mapping[str, Any]) -> None:
        """Write a whole result, and flush it. Raises an OSError that names the file."""
        # A lone surrogate, which UTF-8 cannot encode, is escaped.
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with name_in_errors(self._path):
            if self._regular:
                self._file.truncate(self._end)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            self._file.flush()
        self._starts[line] = self._end
        self._end += len(data)

    def finish(self) -> None:
        """Sort the results into the order of the requests, in a new file that replaces this one atomically."""
        if not self._regular:
            return
        starts = self._starts[self._starts != _NONE]
        incomplete = os.fstat(self._file.fileno()).st_size > self._end
        if not (incomplete or self._superseded or (starts[1:] < starts[:-1]).any()):
            return
        target = self._path.resolve()
        ordered = target.with_name(f"{target.name}.ordered")
        try:
            with name_in_errors(ordered), target.open("rb") as source, ordered.open("wb") as file:
                for start in starts:
                    source.seek(int(start))
                    file.write(source.readline())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, ordered)
            ordered.replace(target)
        finally:
            ordered.unlink(missing_ok=True)
