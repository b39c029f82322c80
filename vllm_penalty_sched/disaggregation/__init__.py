"""Which prompts to prefill on a prefill instance, and whether to have one: pure, no vLLM."""
