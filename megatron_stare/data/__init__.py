"""Sources of prompts, with the data, the order and the resumable state of each source."""
