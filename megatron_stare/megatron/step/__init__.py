"""One training step on a rank: passes, statistics, loss, gradients, measurements."""
