"""Worlds: what the loop needs to know of a domain, as a handful of functions in one module.

    prepare(o)                       check the world's options and files; called first
    load_policy(o)                   the Policy with adapters "agent" and "env"
    base_tasks(o)                    list of Task: the seeds everything starts from
    validation_tasks(o, split)       held-out tasks; split "validation" or "tuning"
    env_prompt(seed, success, alpha) what the simulator is asked: text, or chat messages
    parse_task(text, seed, epoch)    what it wrote -> Task; raises InvalidTask(reason)
    agent_prompt(task)               what the agent is asked: text, or chat messages
    score(task, response)            Eq. 1 -> (reward in [0, 1], valid)
    skills(task)                     names of the tools a task uses (for the diversity figures)
    task_length(task)                its length in the world's natural unit
    category(task)                   a label that validation is broken down by

A new world is a new module here and a line in WORLDS; the loop does not change. Text that a model
wrote is only ever parsed, never executed.
"""
import dataclasses
import importlib

from data_pool import Task, UserError, read_jsonl

WORLDS = ("ladder", "tool_calls")


class InvalidTask(ValueError):
    """What the simulator wrote is no task; the message is the reason it is counted under."""


def load_world(name: str):
    """The module of a world. Raises UserError for an unknown name."""
    if name not in WORLDS:
        raise UserError(f"unknown world {name!r}: choose from {', '.join(WORLDS)}")
    return importlib.import_module(f"worlds.{name}")


def read_teacher(world, path) -> list:
    """Tasks of a teacher's file: JSONL, the field "text" in the form the simulator would write.

    Raises UserError naming the line that is no task of the world.
    """
    if not path:
        raise UserError("--variant teacher needs --teacher-tasks FILE")
    tasks = []
    for n, record in enumerate(read_jsonl(path), 1):
        try:
            task = world.parse_task(str(record.get("text")), Task("", {}), 0)
        except InvalidTask as reason:
            raise UserError(f"{path}, record {n}: {reason}") from None
        tasks.append(dataclasses.replace(task, origin="teacher"))
    if not tasks:
        raise UserError(f"{path}: holds no tasks")
    return tasks
