"""Provide what policy.py builds on; README.md describes it."""
import logging

# set this before bitsandbytes is imported: it warns about optional kernels as it loads
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
