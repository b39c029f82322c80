"""The command line: `vllm-penalty`."""
