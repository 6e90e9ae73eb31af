"""The block server computes one span of a model's blocks for sessions.

It owns the span's weights, the pages of KV cache and the one engine thread that uses them. It promises that a
step is executed at most once, that rows of different sessions never change each other's numbers, and that all a
session held is free once its stream has ended, however it ended. It never reads a tensor outside its span, never
holds token ids, and decides nothing about routes.
"""
