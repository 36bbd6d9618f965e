"""Engines: the interface, the in-process engine, SGLang's servers, and their replicas."""
