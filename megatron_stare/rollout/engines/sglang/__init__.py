"""Runs rollouts on SGLang servers over HTTP. Starts servers, sends requests, and updates
weights."""
