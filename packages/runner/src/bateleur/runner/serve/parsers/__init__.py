"""Parsers of model output: reasoning, content and tool calls as events.

`ChatFormat` describes the output format of a model. `prepare` returns the parameters of a request and a reader that
turns the engine's outputs into events:

    chat_format = ChatFormat(options, tokenizer)             # once per model
    prepared = chat_format.prepare(request, prompt)
    ...                                                     # submit with prepared.params
    reader = prepared.reader()                              # one per continuation
    for completion in outputs:                              # CompletionOutput, deltas or whole
        for event in reader.read(completion): ...           # Content, Reasoning, ToolCall, Arguments, End

Every API translates these events. Each module of a format, such as `hermes`, parses calls in one notation.
"""
