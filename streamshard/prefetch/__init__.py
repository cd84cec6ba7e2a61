"""Refs to samples, ahead of time."""
