"""The vLLM server of an engine.  Runs where only vLLM and its dependencies are installed."""
