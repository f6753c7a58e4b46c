"""Image bytes to embedding rows."""
