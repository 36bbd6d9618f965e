"""Reads and writes weights in files, and streams weights from ranks to engines. Callers pass the
process groups as arguments."""
