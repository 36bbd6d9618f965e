"""Weights on their way from ranks to engines: the stream, its plan, its checksums."""
