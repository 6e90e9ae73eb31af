"""The router's migrations. Only `shoal db upgrade` runs them."""
