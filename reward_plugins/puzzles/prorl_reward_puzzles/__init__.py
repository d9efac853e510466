"""Reward plugin `puzzles`: reasoning-gym's data sets, judged by their own scorers."""
