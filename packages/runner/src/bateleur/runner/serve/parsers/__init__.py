"""Parsers of model output: reasoning, content and tool calls as events.

`ChatFormat.prepare` returns the parameters of a request and the reader of its answer. Every API translates the reader's
events. Each module of a format, such as `hermes`, parses calls in one notation.
"""
