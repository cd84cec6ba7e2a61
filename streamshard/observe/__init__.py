"""What happened, as frozen records for hooks."""
