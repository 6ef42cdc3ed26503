"""From prompts to batches: prompts, scores, filtering, batches and packed rows."""
