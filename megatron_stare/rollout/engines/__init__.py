"""Contains the engine interface, the in-process engine, the engine on SGLang servers, and engine
replicas."""
