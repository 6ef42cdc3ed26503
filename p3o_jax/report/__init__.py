"""`p3o report`: runs as one HTML file that needs nothing else, and the same figures as files."""
