"""HTTP server of a vLLM engine.  It runs in the rollout environment, which has only vLLM and its dependencies."""

SERVED_SUFFIX = ".served"  # suffix of the file with which an engine tells the supervisor of its first response
