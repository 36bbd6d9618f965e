"""Contains rollout engines: the interface, the in-process engine, the SGLang engine and the
replicas."""
