"""Measurements of parts, in ratios taken in one run."""
