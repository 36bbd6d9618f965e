"""Transfers weights from ranks to engines. Contains the stream of weights, the plan of the stream,
and the interfaces for sending weights."""
