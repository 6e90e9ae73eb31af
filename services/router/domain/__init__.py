"""What the router decides, as pure functions over frozen values."""
