"""Prompt records: files, generators, weighted blends with exact resume, and tokenization."""
