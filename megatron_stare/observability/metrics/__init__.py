"""The metrics of a step, the alerts they raise, and the monitor that tells both to every sink."""
