"""Megatron: its ``forward_backward_func`` on any of the schedules here."""

from stagewright.engine.megatron.forward_backward import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
