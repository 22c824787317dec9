"""The HTTP server: TGI's, OpenAI's and Anthropic's APIs over one core."""
