"""The command line: ``streamshard``."""
