"""An HTTP server that speaks the protocol of OpenAI."""
