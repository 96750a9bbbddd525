"""Is there anything to learn? One look at the batch of epoch 0, before hours are spent on it.

What of the paper this is: nothing; both of its updates stand still where no task is valid or where
every group has equal rewards (a group's advantages are then 0, Prop. 1), and a run would go on for
epochs without a word.

How it is run: runtime/run.py calls `judge` after epoch 0, prints the line, and stops with the paragraph
unless --no-gate is given.
"""

START = ("let the model imitate base tasks first, `python genenv.py warm-start --model M "
         "--base-tasks F --out DIR`, and go on with --model DIR")


OWN = ("go back to this world's own options, --temperature and the token limits above all",)


def judge(written: int, valid: int, p_hats, G: int, rewards=None,
          own_model=False) -> tuple[str, str]:
    """(line to print, paragraph that stops the run or "") for the batch of epoch 0.

    written, valid: generations of the simulator, and how many are tasks; written is 0 where tasks
    are ready-made. p_hats: success rates of the tasks tried, G attempts each. rewards: (B, G) where
    attempts earn a similarity in [0, 1]: a group is mixed if its rewards differ. Without them it is
    by p_hat. own_model: the world brings model and base tasks, so that no others can be advised.
    """
    n = len(p_hats)
    mixed = sum(max(row) > min(row) for row in rewards) if rewards is not None else \
        sum(0 < p < 1 for p in p_hats)
    success = sum(p_hats) / n if n else 0.0
    tasks = f"{valid} of {written} written tasks valid, " if written else ""
    line = (f"before training: {tasks}success {success:.2f} on {n} tasks, groups with mixed "
            f"rewards {mixed} of {n}")
    if written and not valid:
        return line, _stop("the simulator wrote no valid task", OWN if own_model else (
            START, "make tasks easier to write (--call-format python --tools base in the "
            "tool_calls world)", "take a stronger model"))
    if mixed == 0 and success > 0.5:
        return line, _stop(f"every attempt at each of {n} tasks succeeded", OWN if own_model else (
            "bring harder base tasks", "take a weaker model"))
    if mixed == 0:  # more attempts at tasks that are never solved end like the first
        return line, _stop(f"none of the groups of {G} attempts at {n} tasks had rewards that "
                           "differ", OWN if own_model else (
                               START, "bring easier base tasks", "take a stronger model"))
    return line, ""


def _stop(what: str, advice) -> str:
    """One paragraph: what is wrong, what it means, what to do."""
    return (f"stopped before training: {what}, so neither the agent nor the simulator would learn "
            f"anything. What helps: {'; or '.join(advice)}. samples.jsonl has what the model "
            "wrote. To go on all the same, add --no-gate.")
