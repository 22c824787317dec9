"""`bloomery bench URL`: a load generator for OpenAI- and TGI-compatible servers."""
