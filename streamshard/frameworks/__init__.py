"""How other loaders and trainers checkpoint a `StreamDataset` exactly: one file for each that needs something of its own."""
