"""Object store to bytes."""
