"""Decisions of language models, pure: values in, values out."""
