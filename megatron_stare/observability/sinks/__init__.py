"""Contains the built-in sinks, one per file. `observability/sink.py` defines the interface of sinks
and lists the built-in sinks' names."""
