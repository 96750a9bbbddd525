"""Provide what policy.py builds on, see README.md."""
import logging

# set before bitsandbytes is imported, since it warns of optional kernels as it loads
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
