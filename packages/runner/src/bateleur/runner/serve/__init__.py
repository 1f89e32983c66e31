"""HTTP server with the APIs of OpenAI and Anthropic."""
