"""The sinks that ship, a file each; `observability/sink.py` is the contract and lists them by
name."""
