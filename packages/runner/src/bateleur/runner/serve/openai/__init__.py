"""OpenAI's words: what a request body asks for, and how a reply is told. Plain dictionaries in and out."""
