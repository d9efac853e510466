"""HTTP server of a vLLM engine.  It runs in the rollout environment, which has only vLLM and its dependencies."""
