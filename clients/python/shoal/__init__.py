"""Shoal: one large language model across many machines. The public names load on first use."""

from __future__ import annotations
