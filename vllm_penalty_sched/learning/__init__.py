"""Learn what a step takes, and how far off the predictions are."""
