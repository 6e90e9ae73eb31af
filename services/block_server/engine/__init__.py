"""One thread that owns device and cache, and packs waiting rows of all sessions into one forward pass."""
