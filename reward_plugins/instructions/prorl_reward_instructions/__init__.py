"""Reward plugin `instructions`: how many of a prompt's verifiable instructions a response follows."""
