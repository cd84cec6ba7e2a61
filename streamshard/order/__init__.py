"""Which ref comes next: pure arithmetic, no I/O."""
