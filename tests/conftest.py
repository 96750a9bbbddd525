"""Tests run on one thread: two beside another busy process are far slower than one."""
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")
