"""The sink: the interface of whatever takes down what a run reports."""
