"""Kinds of consumers. A new kind is one file or folder here, one entry in `kinds` and its test."""
