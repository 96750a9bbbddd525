"""Tests run on one thread: two torch threads beside another busy process are far slower than one."""
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")
