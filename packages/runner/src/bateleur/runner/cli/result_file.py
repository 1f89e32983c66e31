"""Where results of a file of requests go: a JSON object a line, each written as its request ends.

A result file is always good to go on from: a run that was stopped leaves whole lines, in the order in which requests
ended, and perhaps a torn one. When all have ended, the lines are put in the order of the requests. What is kept of a
result is where it begins: 8 bytes for each line of requests.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bateleur.runner.cli.console import naming
from bateleur.runner.cli.line_forms import FIRST, answered
from bateleur.runner.cli.request_file import RequestFile

_NONE = -1


class ResultStream:
    """Results go to stdout, where nothing can be read back."""

    folder: Path | None = None
    """Where there is room for results, as far as that is known."""

    def begin(self, requests: RequestFile) -> int:
        """Look at what there is from an earlier run; how many requests have a result already."""
        return 0

    def has(self, line: int) -> bool:
        """Whether the request of this line has a result."""
        return False

    def write(self, line: int, record: Mapping[str, Any]) -> None:
        """Write the result of a line, at once."""
        with naming("stdout"):
            sys.stdout.buffer.write(_encoded(record))
            sys.stdout.buffer.flush()

    def finish(self) -> None:
        """All have ended."""

    def close(self) -> None:
        """Nothing more will be written."""


class ResultFile(ResultStream):
    """Results go to a file, which is opened here; an OSError says why it cannot be.

    path: the file. One that is no regular file, such as a pipe, is written to and that is all.
    source: where the requests come from; ValueError if that is the same file.
    overwrite: forget what the file holds, as soon as there is a first result.
    """

    def __init__(self, path: Path, source: str, *, overwrite: bool) -> None:
        if source != "-" and path.exists() and path.samefile(source):
            raise ValueError(f"--output is {path}; that is the prompt file")
        self._path = path
        self._overwrite = overwrite
        self._file = path.open("ab", buffering=0)
        self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        if self._regular:
            self.folder = path.resolve().parent
        self._starts = np.empty(0, np.int64)
        """By line, where its result begins."""
        self._end = 0
        self._superseded = False
        """Whether the file has results that count no more."""

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()

    def begin(self, requests: RequestFile) -> int:
        """How many results are here from an earlier run, and need not be computed again: all but failed ones.

        Raises ValueError if another run writes to the file, it holds anything but results, or a result answers another
        request than its line now makes.
        """
        self._starts = np.full(requests.num_lines + 1 if self._regular else 0, _NONE, np.int64)
        if not self._regular:
            return 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output is {self._path}; another run is writing to it") from error
        if self._overwrite or not os.fstat(self._file.fileno()).st_size:
            return 0
        answers = self._read()
        kept = self._starts != _NONE
        asked = np.zeros_like(answers)
        for request in requests if kept.any() else ():
            asked[request.line] = int(request.digest or "0", 16)
        if len(wrong := np.flatnonzero(kept & (answers != asked))):
            self._refuse(int(wrong[0]))
        return int(kept.sum())

    def _read(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Find where results begin; the digests that they answer, by line."""
        answers = np.zeros(len(self._starts), np.uint64)
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and any(first.startswith(raw[: len(first)]) for first in FIRST):
                    break  # the run before was killed as it wrote this
                try:
                    line, digest = answered(raw)
                    answer = np.uint64(digest or 0)
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                    raise ValueError(
                        f"--output is {self._path}; its line {number} is no result of this command. Name another file, "
                        "or replace it with --overwrite"
                    ) from error
                if not 0 < line < len(answers):
                    self._refuse(line)
                self._superseded |= digest is None or bool(self._starts[line] != _NONE)
                self._starts[line] = _NONE if digest is None else self._end
                answers[line] = answer
                self._end += len(raw)
        return answers

    def _refuse(self, line: int) -> None:
        raise ValueError(
            f"--output is {self._path}; its result for line {line} answers another prompt, model or "
            "parameters. Name another file, or replace it with --overwrite"
        )

    def has(self, line: int) -> bool:
        """Whether the request of this line has a result."""
        return self._regular and bool(self._starts[line] != _NONE)

    def write(self, line: int, record: Mapping[str, Any]) -> None:
        """Write a result, at once and whole, or raise an OSError that names the file."""
        data = _encoded(record)
        with naming(self._path):
            if self._regular:
                self._file.truncate(self._end)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        if self._regular:
            self._starts[line] = self._end
        self._end += len(data)

    def finish(self) -> None:
        """Put the lines in the order of the requests, in a new file that takes the place of this one in one move."""
        if not self._regular:
            return
        starts = self._starts[self._starts != _NONE]
        torn = os.fstat(self._file.fileno()).st_size > self._end
        if not (torn or self._superseded or (starts[1:] < starts[:-1]).any()):
            return
        target = self._path.resolve()
        ordered = target.with_name(f"{target.name}.ordered")
        try:
            with naming(ordered), target.open("rb") as source, ordered.open("wb") as file:
                for start in starts:
                    source.seek(int(start))
                    file.write(source.readline())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, ordered)
            ordered.replace(target)
        finally:
            ordered.unlink(missing_ok=True)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """One line of JSON in UTF-8. Half a surrogate pair, which UTF-8 lacks, is escaped as JSON has it."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
