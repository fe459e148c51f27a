"""The one exception of this package."""


class ScheduleError(ValueError):
    """A schedule cannot serve a shape, or a program breaks a rule of pipeline execution.

    The message says the rule, the numbers and the remedy. ``rule`` is the short name of the broken
    rule where one exists (``"circular wait"``, ``"channel order"``, …), else the empty string.
    """

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(f"{rule}: {message}" if rule else message)
        self.rule = rule
