"""One training step on a fixed batch: in a layout, on one rank, and how far the two are apart."""
