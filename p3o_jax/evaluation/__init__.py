"""Evaluation of a policy on held-out prompts, and the files that it writes."""
