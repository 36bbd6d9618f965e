"""Sources of prompts: their data, order and resumable state."""
