"""What all sides must agree on when they talk: errors, tensors, identities, channels, tokens, the clock.

Importing this package loads nothing; only `shoal.wire.tensors` loads torch.
"""
