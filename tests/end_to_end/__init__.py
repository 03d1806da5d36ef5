"""Whole runs: what a user would see."""
