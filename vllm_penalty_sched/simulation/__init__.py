"""What a simulation needs besides vLLM: traces, step costs, a device, and what came of it."""
