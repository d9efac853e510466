"""Rollouts: the vLLM server, its client, weight publication, and the collector of judged groups.

`engine/` runs in the rollout environment, where only vLLM and its dependencies are installed.  The other modules run in
the train environment and do not import vLLM.
"""
