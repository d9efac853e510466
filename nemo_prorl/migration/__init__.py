"""Configurations of TRL, verl, NeMo-RL and OpenRLHF in this project's keys."""
