"""The metrics of a step, the alerts that they raise, and the monitor that passes both to every
sink."""
