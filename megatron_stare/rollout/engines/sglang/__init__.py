"""Rollouts from SGLang servers over HTTP: starts servers, sends requests, and updates weights."""
