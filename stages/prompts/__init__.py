"""Prompts: data sets, and the source that admits them into the pipeline."""
