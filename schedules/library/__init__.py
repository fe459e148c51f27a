"""Every schedule of the literature, each as data; importing this package registers them all."""

from stagewright.schedules.library.bfs import BreadthFirst
from stagewright.schedules.library.chimera import Chimera
from stagewright.schedules.library.dualpipe import DualPipe
from stagewright.schedules.library.dualpipev import DualPipeV
from stagewright.schedules.library.gis import GroupedInterleaved
from stagewright.schedules.library.gpipe import GPipe
from stagewright.schedules.library.hanayo import Hanayo
from stagewright.schedules.library.interleaved import Interleaved
from stagewright.schedules.library.interleaved_zb import InterleavedZeroBubble
from stagewright.schedules.library.none import NoPipelining
from stagewright.schedules.library.one_f_one_b import OneFOneB
from stagewright.schedules.library.pipedream import PipeDream
from stagewright.schedules.library.seq1f1b import SequenceSliced
from stagewright.schedules.library.two_buffered import DoubleBuffered
from stagewright.schedules.library.two_buffered_interleaved import InterleavedDoubleBuffered
from stagewright.schedules.library.v_half import VHalf
from stagewright.schedules.library.v_min import VMin
from stagewright.schedules.library.zb_auto import ZeroBubble1P, ZeroBubble2P, ZeroBubbleAuto
from stagewright.schedules.library.zb_h1 import ZeroBubbleH1
from stagewright.schedules.library.zb_h2 import ZeroBubbleH2
from stagewright.schedules.library.zbv import ZeroBubbleV

__all__ = [
    "BreadthFirst",
    "Chimera",
    "DoubleBuffered",
    "DualPipe",
    "DualPipeV",
    "GPipe",
    "GroupedInterleaved",
    "Hanayo",
    "Interleaved",
    "InterleavedDoubleBuffered",
    "InterleavedZeroBubble",
    "NoPipelining",
    "OneFOneB",
    "PipeDream",
    "SequenceSliced",
    "VHalf",
    "VMin",
    "ZeroBubble1P",
    "ZeroBubble2P",
    "ZeroBubbleAuto",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "ZeroBubbleV",
]
