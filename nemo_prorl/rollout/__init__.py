"""Rollouts: the vLLM server, its client, weight publication, and the collector of judged groups.

`server.py` and the `engine_*.py` modules run in the rollout environment, where only vLLM and what it brings is
installed.  The other modules run in the train environment and know no vLLM.
"""
