"""Benchmarks: `python -m benchmarks ID...` measures figures against `targets.toml`, one JSON line for each.

Everything is measured as shipped (TLS on, real processes) and side by side with its yardstick in the same run, so
that figures of different machines can be compared.
"""
