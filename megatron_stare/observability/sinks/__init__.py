"""The sinks that ship, one per file; `observability/sink.py` defines the interface and lists their
names."""
