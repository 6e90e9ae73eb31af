"""What the registry decides, as pure functions over frozen values."""
