"""A run on the disk and in time: its directory, its checkpoints, what it says of itself, and what may end it."""
