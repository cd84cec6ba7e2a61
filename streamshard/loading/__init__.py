"""How `StreamLoader` gets its batches: who forms them, in which thread or process, and what was handed out."""
