"""A file of requests: one JSON object a line, each on its own. What is wrong with a line stays with that line.

The file is never held in memory: it is read through once, to see what its lines are and which ids come twice, and then
again for each pass over its requests, a line at a time.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from os import fstat
from pathlib import Path
from typing import IO, Any, BinaryIO

from bateleur.runner.cli.console import naming
from bateleur.runner.cli.line_forms import BatchForm, Form, LineRequest, OwnForm
from bateleur.runner.cli.parquet import is_parquet, lines_of
from bateleur.runner.cli.repeats import Repeats

_LONGEST = 1 << 26
"""Most bytes of a line."""
_OF_BATCHES = {"custom_id", "method", "url", "body"}
"""A line with one of these fields is of OpenAI's form."""


@dataclass(frozen=True, slots=True)
class LineReader:
    """Makes requests of lines, wherever they are read."""

    name: str
    """Of the file."""
    form: Form
    engine: str
    """Digest of what decides tokens beside the line."""

    def request(self, number: int, raw: bytes, first: Callable[[str | int], int]) -> LineRequest:
        """What a line asks for, or why that can't be told. first: the line that has an id first."""
        where = f"{self.name}, line {number}"
        ident: str | int | None = number if isinstance(self.form, OwnForm) else None
        try:
            fields = _object(raw)
            own = self.form.ident(fields, number)
            if (before := first(own)) != number:
                raise ValueError(f"id is {json.dumps(own)}; line {before} has it already")
            ident = own
            asked = self.form.asked(fields)
            decided = [self.form.name, ident, asdict(asked), self.engine]
            digest = hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode())
        except (ValueError, RecursionError) as error:
            return LineRequest(number, ident, "", None, where, f"{where}: {error}")
        return LineRequest(number, ident, digest.hexdigest()[:16], asked, where)


@dataclass(frozen=True, slots=True)
class Part:
    """Some lines of a file, to be read by another process."""

    path: Path
    start: int
    """Bytes before the first of them."""
    lines: tuple[tuple[int, int], ...]
    """Each with its number, and the line that has its id first; 0 for lines that are passed over."""

    def requests(self, reader: LineReader) -> Iterator[LineRequest]:
        """Those of its lines."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for number, first in self.lines:
                raw = _line(file)
                if number:
                    yield reader.request(number, raw, lambda ident, first=first: first)  # type: ignore[misc]


class RequestFile:
    """The requests of a file, in their order, for one pass after the other.

    Lines end at a newline alone; blank ones, and a byte order mark, are passed over. The first line whose form can be
    told decides for all. What is added to the file after it was opened is not read.

    file: its path; `-` is stdin. It is opened here, and read by `survey`. own, batch: the forms that there are.
    engine: what decides tokens beside the line; for the digest.
    """

    def __init__(self, file: str, own: OwnForm, batch: BatchForm, engine: Mapping[str, Any]) -> None:
        self.name = "stdin" if file == "-" else file
        self.form: Form = own
        self.num_lines = 0
        """Blank ones included."""
        self._num_requests = 0
        self._batch = batch
        self._engine = hashlib.sha256(json.dumps(engine, sort_keys=True).encode()).hexdigest()
        self._repeats = Repeats()
        self._parquet = file != "-" and is_parquet(file)
        self._file: BinaryIO | IO[bytes] = sys.stdin.buffer
        with naming(self.name):
            if file != "-":
                self._file = Path(file).open("rb")  # noqa: SIM115 (until `close`)
            self._again = file != "-" and stat.S_ISREG(fstat(self._file.fileno()).st_mode)
        self.path = Path(file).resolve() if self._again else None
        """Where other processes can read it."""
        self._last = 0

    def __len__(self) -> int:
        """How many lines are not blank."""
        return self._num_requests

    def __iter__(self) -> Iterator[LineRequest]:
        """All requests; one pass at a time."""
        return self.left(lambda line: False)

    def left(self, done: Callable[[int], bool]) -> Iterator[LineRequest]:
        """The requests of all lines but those that are done, which are hardly looked at; one pass at a time."""
        self._repeats.again()
        for number, raw in islice(self._lines(), self.num_lines):
            if raw.strip() and (self._repeats.any or not done(number)):
                request = self._request(number, raw)
                if not done(number):
                    yield request

    def close(self) -> None:
        """No pass will come."""
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and contents; of a line that is too long its beginning, which is too long as well."""
        with naming(self.name):
            self._file.seek(0)
            if self._file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                self._file.seek(0)
            number, self._last = 0, self._file.tell()
            while raw := _line(self._file):
                number += 1
                yield number, raw

    def survey(self, spool: Path | None = None) -> None:
        """See what the lines are.

        What can't be read twice, stdin or a pipe, is copied to a temporary file first: in the folder `spool`, or where
        the system has such files.
        """
        if self._parquet:
            self._copy_rows(spool)
        elif not self._again:
            with naming(f"a copy of {self.name} in {spool or tempfile.gettempdir()}"):
                source = self._file
                self._file = tempfile.TemporaryFile(dir=spool)  # noqa: SIM115 (until `close`)
                shutil.copyfileobj(source, self._file, 1 << 20)
                source.close()
        told = False
        for number, raw in self._lines():
            self.num_lines = number
            if not raw.strip():
                continue
            self._num_requests += 1
            with suppress(ValueError):  # what is wrong with a line is told when its turn comes
                fields = _object(raw)
                if not told and not _OF_BATCHES.isdisjoint(fields):
                    self.form = self._batch
                told = True
                self._repeats.add(self.form.ident(fields, number))
        self._repeats.sort()

    def _request(self, number: int, raw: bytes) -> LineRequest:
        return self.reader.request(number, raw, lambda ident: self._repeats.first(ident, number))

    def _copy_rows(self, spool: Path | None) -> None:
        """Rows become lines, in a file that others can read while this one is open."""
        assert self.path is not None
        source, self._file = self._file, tempfile.NamedTemporaryFile(dir=spool, suffix=".jsonl")  # noqa: SIM115
        source.close()
        with naming(f"a copy of {self.name} in {spool or tempfile.gettempdir()}"):
            self._file.writelines(lines_of(self.path))
            self._file.flush()
        self.path = Path(self._file.name)

    @property
    def reader(self) -> LineReader:
        """What makes requests of its lines."""
        return LineReader(self.name, self.form, self._engine)

    def parts(self, done: Callable[[int], bool], size: int) -> Iterator[Part]:
        """Where the lines are that are not done, at most `size` of them together. Not for what was copied."""
        assert self.path is not None
        self._repeats.again()
        start, kept = 0, list[tuple[int, int]]()
        for number, raw in islice(self._lines(), self.num_lines):
            begin, self._last = self._last, self._file.tell()
            wanted = bool(raw.strip()) and not done(number)
            first = self._first(number, raw)
            if wanted or kept:
                start = start if kept else begin
                kept.append((number, first) if wanted else (0, 0))
            if sum(bool(each) for each, _ in kept) == size:
                yield Part(self.path, start, tuple(kept))
                kept = []
        if kept:
            yield Part(self.path, start, tuple(kept))

    def _first(self, number: int, raw: bytes) -> int:
        if not self._repeats.any or not raw.strip():
            return number
        with suppress(ValueError, RecursionError):
            return self._repeats.first(self.form.ident(_object(raw), number), number)
        return number


def _line(file: BinaryIO | IO[bytes]) -> bytes:
    """The next line; of one that is too long its beginning, which is too long as well."""
    raw = rest = file.readline(_LONGEST + 2)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(_LONGEST)
    return raw


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) - raw.endswith(b"\n") > _LONGEST:
        raise ValueError(f"more than {_LONGEST} bytes; no request is so long")
    try:
        fields = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {raw[error.start]:#04x} at position {error.start + 1} is not UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at position {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not a request: brackets are nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}; an object is needed")
    return fields
