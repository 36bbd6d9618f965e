"""From a rank's share of a rollout batch to the micro-batches its model is fed."""
