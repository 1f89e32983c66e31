"""Where results of a file of requests go: a JSON object a line, each written as its request ends.

A result file is always good to go on from: a run that was stopped leaves whole lines, in the order in which requests
ended, and perhaps a torn one. When all have ended, the lines are put in the order of the requests.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bateleur.runner.cli.console import naming
from bateleur.runner.cli.request_file import LineRequest

_FIRST = b'{"line": '
"""How a line of a result file begins."""


class ResultStream:
    """Results go to stdout, where nothing can be read back."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a result, at once."""
        with naming("stdout"):
            sys.stdout.buffer.write(_encoded(record))
            sys.stdout.buffer.flush()

    def kept(self, requests: Sequence[LineRequest]) -> set[int]:
        """Lines whose results are here from an earlier run."""
        return set()

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
        self._spans: dict[int, tuple[int, int]] = {}
        """By line, where its result begins and how long it is."""
        self._end = 0

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()

    def _read(self) -> dict[int, str | None]:
        """What the results of the file answer, by line; None for those that failed."""
        answered: dict[int, str | None] = {}
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and _FIRST.startswith(raw[: len(_FIRST)]):
                    break  # the run before was killed as it wrote this
                try:
                    record = json.loads(raw)
                    line, digest = int(record["line"]), record["request"]
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    raise ValueError(
                        f"--output is {self._path}; its line {number} is no result of this command. Name another file, "
                        "or replace it with --overwrite"
                    ) from error
                answered[line] = None if "error" in record else str(digest)
                self._spans[line] = self._end, len(raw)
                self._end += len(raw)
        return answered

    def kept(self, requests: Sequence[LineRequest]) -> set[int]:
        """Lines whose results are here from an earlier run, and need not be computed again: all but failed ones.

        Raises ValueError if another run writes to the file, it holds anything but results, or a result answers another
        request than its line now makes.
        """
        if not self._regular:
            return set()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output is {self._path}; another run is writing to it") from error
        asked = {request.line: request.digest for request in requests}
        answered = {} if self._overwrite else self._read()
        for line, digest in answered.items():
            if digest is None:
                del self._spans[line]
            elif asked.get(line) != digest:
                raise ValueError(
                    f"--output is {self._path}; its result for line {line} answers another prompt, model or "
                    "parameters. Name another file, or replace it with --overwrite"
                )
        return set(self._spans)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a result, at once and whole, or raise an OSError that names the file."""
        data = _encoded(record)
        with naming(self._path):
            if self._regular:
                self._file.truncate(self._end)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        self._spans[record["line"]] = self._end, len(data)
        self._end += len(data)

    def finish(self) -> None:
        """Put the lines in the order of the requests, in a new file that takes the place of this one in one move."""
        if not self._regular:
            return
        spans = [self._spans[line] for line in sorted(self._spans)]
        if spans == sorted(spans) and sum(size for _, size in spans) == os.fstat(self._file.fileno()).st_size:
            return
        target = self._path.resolve()
        ordered = target.with_name(f"{target.name}.ordered")
        try:
            with naming(ordered), target.open("rb") as source, ordered.open("wb") as file:
                for start, size in spans:
                    source.seek(start)
                    file.write(source.read(size))
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, ordered)
            ordered.replace(target)
        finally:
            ordered.unlink(missing_ok=True)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """One line of JSON in UTF-8. Half a surrogate pair, which UTF-8 lacks, is escaped as JSON has it."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
