"""The registry's migrations. Only `shoal db upgrade` runs them."""
