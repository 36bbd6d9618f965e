"""Many replicas of an engine: weights and requests to all, health, retries, lost ones brought
back."""
