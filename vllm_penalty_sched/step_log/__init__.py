"""Read a step trace: what happened, what it cost, and what to change."""
