"""Contains the built-in sinks. Each built-in sink has its own file. `observability/sink.py` defines
the interface of sinks and lists the built-in sinks' names."""
