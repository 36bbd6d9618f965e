"""One operating-system process and its surroundings: signals, time limit, addresses, memory, what
is installed."""
