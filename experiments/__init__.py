"""One file a claim: variants, command, expected time and result."""
