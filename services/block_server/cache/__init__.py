"""KV cache in pages: who holds which page, and the tensors behind them."""
