"""Contains the checks and forecasts that are made before a run starts: preflight, placement, memory
per rank, time per phase, and layouts that fit."""
