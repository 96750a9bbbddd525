"""A rival of tool_calls for experiments, scripts/bandit.py: found by its name, in no list of worlds."""
from scripts.bandit import World
