"""Pictures of a timeline."""

from stagewright.schedules.drawing.text import grid_text

__all__ = ["grid_text"]
