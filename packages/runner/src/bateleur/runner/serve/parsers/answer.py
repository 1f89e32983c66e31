"""Parser of one answer: reasoning first, then content and tool calls."""

from collections.abc import Callable, Sequence

from bateleur.runner.outputs import CompletionOutput, TextTag
from bateleur.runner.serve.parsers.events import Arguments, Content, End, Event, Reasoning, ToolCall, merged
from bateleur.runner.serve.parsers.source import THINK, THINK_END, Parse, Search, Source, TagTable, skip_space
from bateleur.runner.serve.parsers.tool_format import Calls, ToolFormat
from bateleur.runner.serve.parsers.values import is_complete

_LONGEST_PIECE = 512
"""Characters parsed at once: removing text from the front of a longer string would copy the rest each time."""


class AnswerParser:
    """Incremental parser of one answer. Reasoning ends at its end tag or, if it has none, at a tool call."""

    def __init__(
        self,
        *,
        opened: bool | None = None,
        calls: ToolFormat | None = None,
        table: TagTable | None = None,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """opened: whether the prompt has opened the reasoning; None leaves reasoning in the content.

        calls: format of tool calls; None leaves them in the content. table: tags that are single tokens.
        make_id: creates ids for tool calls without an id from the model.
        """
        self._opened, self._format = opened, calls
        self._calls = None if calls is None else Calls(calls, self._report, make_id)
        self._table = TagTable() if table is None else table
        self._source = Source()
        self._events: list[Event] = []
        self._space = ""
        """White space that is reported with the next text, or dropped if a tag follows."""
        self._after_call = self._has_content = False
        start_tags = () if calls is None else calls.start_tags
        self._begin, self._end = ("", "") if opened is None else map(self._table.marker, (THINK, THINK_END))
        again = "" if self._begin == THINK else self._begin
        self._in_reasoning = Search(filter(None, (self._end, *start_tags)))
        self._in_content = Search(filter(None, (again, self._end, *start_tags)))
        self._parse = self._answer()
        self._arguments: str | None = None
        """Arguments of the last call so far; None without calls."""

    def read(self, completion: CompletionOutput) -> list[Event]:
        """Return the events of the next output, a delta or the whole answer. The last event of all is `End`.

        A stop string that is not a tag truncates a call, as a token limit does. The finish reason of a truncated
        call is not "tool_calls".
        """
        events = self.feed(completion.text, completion.tags)
        reason, stop = completion.finish_reason, completion.stop_reason
        cuts = isinstance(stop, str) and not stop.lstrip().startswith("<")
        if reason is not None:
            events += self.finish(cut=reason != "stop" or cuts)
        for event in events:
            if isinstance(event, ToolCall):
                self._arguments = ""
            elif isinstance(event, Arguments):
                self._arguments = (self._arguments or "") + event.text
        if reason is not None:
            called = self._arguments is not None and (not cuts or is_complete(self._arguments))
            events.append(End("tool_calls" if reason == "stop" and called else reason, stop))
        return events

    def feed(self, text: str, tags: Sequence[TextTag] = ()) -> list[Event]:
        """Parse more text; `tags`: tokens in it such as <think>. Returns the events that later text can't change."""
        marked = self._table.mark(text, tags)
        for at in range(0, len(marked), _LONGEST_PIECE):
            self._source.text += marked[at : at + _LONGEST_PIECE]
            next(self._parse, None)
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text and return the remaining events. cut: whether the text was truncated by a limit."""
        self._source.final, self._source.cut = True, cut
        for _ in self._parse:
            raise AssertionError("a parser waits for text after the end")
        if not self._after_call:
            self._say("", whole=True)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    def _report(self, event: Event) -> None:
        if isinstance(event, ToolCall):
            self._space, self._after_call = "", True
        self._events.append(event)

    def _answer(self) -> Parse[None]:
        if self._opened is not None and ((yield from self._takes_begin()) or self._opened):
            yield from self._reasoning()
        if self._format is not None and self._format.BARE_STARTS:
            at = yield from skip_space(self._source, 0)
            if self._source.text.startswith(tuple(self._format.BARE_STARTS), at):
                self._space += self._source.take(at)
                yield from self._read_calls()
        yield from self._content()

    def _read_calls(self) -> Parse[bool]:
        assert self._format is not None
        assert self._calls is not None
        return (yield from self._format.read(self._source, self._calls))

    def _takes_begin(self) -> Parse[bool]:
        source = self._source
        at = yield from skip_space(source, 0)
        while not source.final and self._begin.startswith(source.text[at:]) and source.text[at:] != self._begin:
            yield
        if source.text.startswith(self._begin, at):
            source.take(at + len(self._begin))
            return True
        return False

    def _reasoning(self) -> Parse[None]:
        source = self._source
        source.take((yield from skip_space(source, 0)))
        while True:
            start, tag = self._in_reasoning.first(source)
            self._reason(source.take(start))
            if tag == self._end:
                source.take(len(tag))
                self._space = ""
                source.take((yield from skip_space(source, 0)))
                return
            if tag:
                end = yield from self._wait_for_end()
                if end >= 0:
                    self._reason(source.take(end))
                elif self._begins_call():
                    self._space = ""
                    return
                else:
                    self._reason(source.take(len(source.text)))
            elif source.final:
                self._reason("", whole=True)
                return
            else:
                yield

    def _wait_for_end(self) -> Parse[int]:
        """Wait for the end tag of the reasoning and return its position; -1 if the answer ends without it."""
        source, at = self._source, 0
        while (found := source.text.find(self._end, at)) < 0:
            if source.final:
                return -1
            at = max(0, len(source.text) - len(self._end))
            yield
        return found

    def _begins_call(self) -> bool:
        """Return whether the text starts with a tool call, given that no more text follows."""
        assert self._format is not None
        reader = self._format.read(Source(self._source.text, final=True), Calls(self._format, lambda event: None))
        try:
            next(reader)
        except StopIteration as end:
            return bool(end.value)
        raise AssertionError("a parser waits for text after the end")

    def _content(self) -> Parse[None]:
        """Parse content and calls. A further end tag of reasoning is dropped; a further begin tag starts reasoning."""
        source = self._source
        while True:
            start, tag = self._in_content.first(source)
            self._say(source.take(start))
            if not tag:
                if source.final:
                    return
                yield
            elif tag == self._end:
                source.take(len(tag))
                if not self._has_content:
                    self._space = ""
                    source.take((yield from skip_space(source, 0)))
            elif tag == self._begin:
                source.take(len(tag))
                yield from self._reasoning()
            elif not (yield from self._read_calls()):
                self._say(source.take(len(tag)))

    def _say(self, text: str, *, whole: bool = False) -> None:
        """Emit content. White space at its end waits until more text follows, unless the content ends (`whole`)."""
        if text := self._without_space(text, whole=whole):
            self._after_call, self._has_content = False, True
            self._events.append(Content(self._table.unmark(text)))

    def _reason(self, text: str, *, whole: bool = False) -> None:
        if text := self._without_space(text, whole=whole):
            self._events.append(Reasoning(self._table.unmark(text)))

    def _without_space(self, text: str, *, whole: bool) -> str:
        text = self._space + text
        body = text if whole else text.rstrip()
        self._space = text[len(body) :]
        return body
