"""Checks and forecasts made before a run starts: preflight, placement, memory by rank, time by
phase, layouts that fit."""
