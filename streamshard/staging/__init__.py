"""Batches on the device before they are needed: reused host buffers, slots, a copy stream."""
