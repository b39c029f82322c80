"""Measure the penalty: which steps to run, what they took, and what fits them."""
