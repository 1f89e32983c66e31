"""From what a model writes to events: reasoning, content and calls of tools.

`ChatFormat` knows how one model writes. Its `turn` prepares a request, and the turn's `reader` makes events of each
report of the engine:

    chat_format = ChatFormat.of(options, tokenizer)          # once
    turn = chat_format.prepare(params, prompt, tools=tools, tool_choice="auto")
    ...                                                      # submit the prompt with turn.params
    reader = turn.reader()                                   # one for each continuation
    for completion in reports:                               # CompletionOutput, each with what is new
        for event in reader.read(completion): ...            # Content, Reasoning, ToolCall, Arguments, End

Every API is a translation of these events. Each modules of a format, such as `hermes`, finds calls in one notation.
"""
