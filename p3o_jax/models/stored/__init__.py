"""Published models on disk: reading, loading and exporting them."""
