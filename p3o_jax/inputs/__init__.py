"""What is read from files of others: within bounds, by kind, and refused in one line."""
