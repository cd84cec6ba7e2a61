"""Samples to items, inside a partition."""
