"""Measurements behind every figure in the documentation."""
