"""Pictures of a timeline, one module a format: text, SVG, an HTML page, JSON, and a trace for Perfetto."""

from stagewright.schedules.drawing.dump import json_text
from stagewright.schedules.drawing.page import html_text
from stagewright.schedules.drawing.palettes import PALETTES
from stagewright.schedules.drawing.svg import svg_text
from stagewright.schedules.drawing.text import grid_text
from stagewright.schedules.drawing.trace import trace_text

__all__ = ["PALETTES", "grid_text", "html_text", "json_text", "svg_text", "trace_text"]
