"""Memory and collectives of a run on devices that are not there."""
