"""The sharded update, its optimizer, and the supervised warm start."""
