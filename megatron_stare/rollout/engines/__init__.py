"""Engines: the interface, the one in this process, SGLang's servers, and their replicas."""
