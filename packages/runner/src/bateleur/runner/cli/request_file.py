"""Reads files of requests, one JSON object per line. An invalid line does not affect the others.

The file is never held in memory: every pass reads it line by line.
"""

import codecs
import hashlib
import json
import shutil
import stat
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from os import fstat
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from bateleur.runner.cli.console import name_in_errors
from bateleur.runner.cli.line_formats import LineFormat, LineRequest, NativeFormat, OpenAIBatchFormat
from bateleur.runner.cli.parquet import is_parquet, json_lines
from bateleur.runner.utils.arguments import refuse

_MAX_LINE_BYTES = 1 << 26
_HASH_BYTES = 16  # enough that two different ids never share a hash
_BATCH_FIELDS = {"custom_id", "method", "url", "body"}  # A line with one of these fields has OpenAI's batch format


@dataclass(frozen=True, slots=True)
class LineParser:
    """Parses lines of a file into requests. name: name of the file, for error messages. engine_digest: hash of
    everything that decides results apart from the line.
    """

    name: str
    format: LineFormat
    engine_digest: str

    def request(self, number: int, raw: bytes, first: int) -> LineRequest:
        """Return the request of a line, with `error` if invalid. first: number of the first line with the same id."""
        where = f"{self.name}, line {number}"
        valid_id: str | int | None = number if isinstance(self.format, NativeFormat) else None
        try:
            fields = _json_object(raw)
            ident = self.format.pop_id(fields, number)
            if first != number:
                raise ValueError(f"id is {json.dumps(ident)}; line {first} has it already")
            valid_id = ident
            request = self.format.parse(fields)
            digested = [self.format.name, ident, asdict(request), self.engine_digest]
            digest = hashlib.sha256(json.dumps(digested, sort_keys=True, default=str).encode())
        except (ValueError, RecursionError) as error:
            return LineRequest(number, valid_id, "", None, where, f"{where}: {error}")
        return LineRequest(number, valid_id, digest.hexdigest()[:16], request, where)


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Lines that another process reads. lines: byte offset, line number, number of the first line with the same id."""

    path: Path
    lines: tuple[tuple[int, int, int], ...]

    def requests(self, parser: LineParser) -> Iterator[LineRequest]:
        """Yield the requests of the lines."""
        with self.path.open("rb") as file:
            for offset, number, first in self.lines:
                file.seek(offset)
                yield parser.request(number, _read_line(file), first)


class RequestFile:
    """The requests of a file, in file order, for any number of passes, one at a time.

    Only "\\n" ends a line. Blank lines and a byte order mark are skipped. The first valid JSON object decides the
    format of all lines. Lines that are appended after `scan` are not read.

    file: path, or `-` for stdin. native, batch: parsers of the two formats of lines. engine: settings that results
    depend on, included in each request's digest. Raises OSError if the file cannot be opened, and ValueError for a
    Parquet file that is a pipe.
    """

    def __init__(self, file: str, native: NativeFormat, batch: OpenAIBatchFormat, engine: Mapping[str, Any]) -> None:
        name = "stdin" if file == "-" else file
        engine_digest = hashlib.sha256(json.dumps(engine, sort_keys=True).encode()).hexdigest()
        self.parser = LineParser(name, native, engine_digest)
        self._batch, self._num_requests = batch, 0
        self.num_lines = 0  # number of lines, blank ones included
        self._first_lines: dict[int, int] = {}  # by line whose id an earlier line has: the first line with that id
        self._parquet = file != "-" and is_parquet(file)
        self._file: BinaryIO | IO[bytes] = sys.stdin.buffer
        with name_in_errors(name):
            if file != "-":
                self._file = Path(file).open("rb")  # noqa: SIM115 (until `close`)
            regular = file != "-" and stat.S_ISREG(fstat(self._file.fileno()).st_mode)
        if self._parquet and not regular:
            self.close()
            refuse(
                "input", file, "a regular file, because reading Parquet needs seeking; write the data to a file first"
            )
        self.path = Path(file).resolve() if regular else None  # where other processes can read it; not stdin and pipes

    def __len__(self) -> int:
        return self._num_requests  # lines that are not blank

    def __iter__(self) -> Iterator[LineRequest]:
        return self.remaining(lambda line: False)

    def remaining(self, done: Callable[[int], bool]) -> Iterator[LineRequest]:
        """Yield the requests of all lines for which `done` returns False."""
        for _, number, raw in islice(self._lines(), self.num_lines):
            if raw.strip() and not done(number):
                yield self.parser.request(number, raw, self._first_lines.get(number, number))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield offset, number and contents of each line."""
        with name_in_errors(self.parser.name):
            self._file.seek(0)
            offset = len(codecs.BOM_UTF8) if self._file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
            self._file.seek(offset)
            number = 0
            while raw := _read_line(self._file):
                number += 1
                yield offset, number, raw
                offset = self._file.tell()

    def scan(self, spool: Path | None = None) -> None:
        """Read the file once: count the lines, detect the format, and find duplicate ids by their hashes.

        spool: folder for the temporary file of stdin, a pipe or Parquet rows; None for the system's default folder.
        """
        if self._parquet or self.path is None:
            self._copy(spool)
        detected, lines, hashes = False, array("q"), bytearray()
        for _, number, raw in self._lines():
            self.num_lines = number
            if not raw.strip():
                continue
            self._num_requests += 1
            with suppress(ValueError):  # a later pass reports invalid lines
                fields = _json_object(raw)
                if not detected and not _BATCH_FIELDS.isdisjoint(fields):
                    self.parser = replace(self.parser, format=self._batch)
                detected = True
                ident = json.dumps(self.parser.format.pop_id(fields, number))
                lines.append(number)
                hashes += hashlib.blake2b(ident.encode(), digest_size=_HASH_BYTES).digest()
        ids = np.frombuffer(hashes, f"S{_HASH_BYTES}")
        order = ids.argsort(kind="stable")
        for index in np.flatnonzero(ids[order[1:]] == ids[order[:-1]]).tolist():
            before, line = lines[order[index]], lines[order[index + 1]]
            self._first_lines[line] = self._first_lines.get(before, before)

    def _copy(self, spool: Path | None) -> None:
        """Copy stdin or a pipe to a file without a name, of which a killed process leaves nothing.

        Parquet rows become lines of a named file, which other processes can read until `close`.
        """
        where = f"a copy of {self.parser.name} in {spool or tempfile.gettempdir()}"
        with name_in_errors(where), self._file as source:
            if self.path is None:
                self._file = tempfile.TemporaryFile(dir=spool)  # noqa: SIM115 (until `close`)
                shutil.copyfileobj(source, self._file, 1 << 20)
                return
            self._file = tempfile.NamedTemporaryFile(dir=spool, suffix=".jsonl")  # noqa: SIM115 (until `close`)
            self._file.writelines(json_lines(self.path))
            self._file.flush()
        self.path = Path(self._file.name)

    def chunks(self, done: Callable[[int], bool], size: int) -> Iterator[FileChunk]:
        """Yield chunks of at most `size` lines for which `done` returns False. Not for stdin and pipes."""
        assert self.path is not None
        left = (
            (offset, number, self._first_lines.get(number, number))
            for offset, number, raw in islice(self._lines(), self.num_lines)
            if raw.strip() and not done(number)
        )
        while lines := tuple(islice(left, size)):
            yield FileChunk(self.path, lines)


def _read_line(file: BinaryIO | IO[bytes]) -> bytes:
    """Read a line. Of a line that is too long, only the first bytes are kept, enough to reject the line later."""
    raw = rest = file.readline(_MAX_LINE_BYTES + 2)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(_MAX_LINE_BYTES)
    return raw


def _json_object(raw: bytes) -> dict[str, Any]:
    if len(raw) - raw.endswith(b"\n") > _MAX_LINE_BYTES:
        raise ValueError(f"the line has more than {_MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {raw[error.start]:#04x} at position {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at position {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("not a request: brackets are nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}; an object is needed")
    return fields
