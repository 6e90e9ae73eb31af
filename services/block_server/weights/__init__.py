"""Transformers' own decoder layers, filled with exactly the span's tensors."""
