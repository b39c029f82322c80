"""Drive a real vLLM server from outside: a small model, the server process, a streaming load."""
