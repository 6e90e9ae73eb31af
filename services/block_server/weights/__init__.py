"""Decoder layers filled with exactly the span's tensors: fused where they are Llama-like, else transformers' own."""
