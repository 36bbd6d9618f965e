"""What a run leaves behind to be looked at: metrics, progress lines, memory, and the report made from them."""
