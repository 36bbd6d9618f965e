"""Manages the replicas of an engine: distributes weights and requests, tracks health, retries
requests, and restarts lost replicas."""
