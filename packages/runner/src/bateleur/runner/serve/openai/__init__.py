"""Request and reply bodies of OpenAI's API, as plain dictionaries."""
