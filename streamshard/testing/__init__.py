"""Checks that users run on their own datasets: an exact resume is a claim, and this is how to test it."""

from streamshard.testing.epochs import assert_exact_epochs
from streamshard.testing.resume import ResumeReport, assert_exact_resume

__all__ = ["ResumeReport", "assert_exact_epochs", "assert_exact_resume"]
