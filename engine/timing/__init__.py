"""Timing: when each instruction ran, and what the simulator is to be told of it."""
