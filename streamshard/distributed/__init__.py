"""Which data-parallel rank this process is."""
