"""Schedules as data: the order in which each rank computes, and all that follows from it without running it."""

from stagewright.schedules import library
from stagewright.schedules.agreements import insert_agreements
from stagewright.schedules.arguments import add_arguments, from_arguments
from stagewright.schedules.communication import insert_communication
from stagewright.schedules.costs import Costs
from stagewright.schedules.errors import ScheduleError
from stagewright.schedules.formula import Formula
from stagewright.schedules.instructions import Instruction, parse
from stagewright.schedules.placement import Placement
from stagewright.schedules.program import Program, UpdateRule
from stagewright.schedules.proof import complete, verify
from stagewright.schedules.registry import create, find, names, register
from stagewright.schedules.schedule import Order, Schedule
from stagewright.schedules.simulation import simulate
from stagewright.schedules.timeline import Event, Timeline

__all__ = [
    "Costs",
    "Event",
    "Formula",
    "Instruction",
    "Order",
    "Placement",
    "Program",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "UpdateRule",
    "add_arguments",
    "complete",
    "create",
    "find",
    "from_arguments",
    "insert_agreements",
    "insert_communication",
    "library",
    "names",
    "parse",
    "register",
    "simulate",
    "verify",
]
