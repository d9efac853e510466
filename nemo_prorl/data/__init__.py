"""Prompt records: files, generators, blends with exact resume, and their way to tokens."""
