"""Reward plugin `code`: Python programs, judged by their tests."""
