"""Every schedule of the literature, each as data; importing this package registers them all."""

from stagewright.schedules.library.gpipe import GPipe
from stagewright.schedules.library.one_f_one_b import OneFOneB

__all__ = ["GPipe", "OneFOneB"]
